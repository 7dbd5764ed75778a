"""Test that a stopped terminal or an unread pipe does not block the launcher, and that its output is complete."""

import io
import os
import pty
import socket
import sys
import termios
import threading
import time
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from types import SimpleNamespace

import pytest

from mindnlp_dp.launch.event_loop import EventLoop
from mindnlp_dp.launch.monitor.background_output import (
    BackgroundOutput,
    Output,
    has_unwritten,
    stop_waiting_for_readers,
)
from mindnlp_dp.launch.monitor.console import Console

MORE_THAN_A_PIPE_TAKES = 1 << 20


@contextmanager
def standard_output(descriptor):
    """Redirect file descriptor 1 and ``sys.stdout`` to ``descriptor``."""
    before, out = os.dup(1), sys.stdout
    try:
        os.dup2(descriptor, 1)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        yield
    finally:
        sys.stdout = out
        os.dup2(before, 1)
        os.close(before)


@pytest.fixture
def pipe():
    reading, writing = os.pipe()
    yield reading, writing
    for end in (reading, writing):
        try:
            os.close(end)
        except OSError:
            pass


def read_all(descriptor, found):
    while part := os.read(descriptor, 1 << 16):
        found.append(part)


def test_unread_output_blocks_no_writer_and_is_not_lost(pipe):
    reading, writing = pipe
    text, found = os.urandom(MORE_THAN_A_PIPE_TAKES), []
    output = Output(writing)
    assert output.write(text) == len(text)
    assert not output.drain(0.05)
    reader = threading.Thread(target=read_all, args=(reading, found))
    reader.start()
    assert output.drain(None)
    output.close()
    os.close(writing)
    reader.join()
    assert b"".join(found) == text


def test_the_pipe_stays_blocking_for_other_processes(pipe):
    output = Output(pipe[1])
    assert os.get_blocking(pipe[1])
    output.close()
    os.write(pipe[1], b"still open")


def test_unread_output_to_a_socket_is_not_lost():
    """Write to a socket, which systemd or Node.js use as the output of their child processes."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        output = Output(ours.fileno())
        output.write(bytes(4 * MORE_THAN_A_PIPE_TAKES))
        assert not output.drain(0.05)
        received = 0
        while received < 4 * MORE_THAN_A_PIPE_TAKES:
            received += len(theirs.recv(1 << 20))
        assert output.drain(60)
        output.close()


def test_output_to_a_non_blocking_pipe_is_not_lost(pipe):
    os.set_blocking(pipe[1], False)
    text, found = os.urandom(MORE_THAN_A_PIPE_TAKES), []
    output = Output(pipe[1])
    output.write(text)
    reader = threading.Thread(target=read_all, args=(pipe[0], found))
    reader.start()
    assert output.drain(60)
    output.close()
    os.close(pipe[1])
    reader.join()
    assert b"".join(found) == text


def test_output_to_a_full_disk_is_dropped_without_an_error():
    with open("/dev/full", "wb") as full:
        output = Output(full.fileno())
        output.write(b"lost")
        assert output.drain(60)
        assert output.error is None
        output.close()


def test_unread_standard_error_does_not_block_standard_output(tmp_path, pipe):
    """Check ``mindnlp-dp run ... > file`` on a stopped terminal, which does not read errors."""
    (tmp_path / "worker_0.log").write_text("a line\n")
    error = sys.stderr
    try:
        sys.stderr = open(pipe[1], "w", closefd=False)  # noqa: SIM115
        with open(tmp_path / "file", "w") as file, standard_output(file.fileno()), BackgroundOutput():
            print("x" * MORE_THAN_A_PIPE_TAKES, file=sys.stderr)
            console = Console(tmp_path, 1, "0", EventLoop())
            console.show_all(lambda: False)
            console.close()
            stop_waiting_for_readers()
    finally:
        sys.stderr = error
    assert (tmp_path / "file").read_text() == "a line\n"


def test_an_output_with_unread_bytes_is_closed(pipe):
    output = Output(pipe[1])
    output.write(bytes(MORE_THAN_A_PIPE_TAKES))
    assert not output.drain(0.05)
    output.close()


def test_output_to_a_stopped_terminal_is_written_when_it_continues():
    master, slave = pty.openpty()
    try:
        output = Output(slave)
        assert output.isatty()
        termios.tcflow(slave, termios.TCOOFF)
        output.write(b"while it is stopped\r\n")
        assert not output.drain(0.05)
        termios.tcflow(slave, termios.TCOON)
        assert output.drain(60)
        assert b"while it is stopped" in os.read(master, 1000)
        output.close()
    finally:
        os.close(master)
        os.close(slave)


def test_stdout_and_stderr_of_one_terminal_stay_in_order():
    master, slave = pty.openpty()
    before = sys.stdout, sys.stderr
    try:
        sys.stdout, sys.stderr = (open(os.dup(slave), "w") for _ in range(2))  # noqa: SIM115
        with BackgroundOutput():
            termios.tcflow(slave, termios.TCOOFF)
            for number in range(3):
                print(f"out {number}")
                print(f"err {number}", file=sys.stderr)
            assert has_unwritten(sys.stdout)
            termios.tcflow(slave, termios.TCOON)
        said = os.read(master, 1000).decode().split("\r\n")
        sys.stdout.close()
        sys.stderr.close()
    finally:
        sys.stdout, sys.stderr = before
        os.close(master)
        os.close(slave)
    assert said == ["out 0", "err 0", "out 1", "err 1", "out 2", "err 2", ""]


def test_output_to_a_file_is_written_in_order(tmp_path):
    with open(tmp_path / "file", "w") as file, standard_output(file.fileno()):
        print("before", flush=True)
        with BackgroundOutput():
            print("within")
        print("after", flush=True)
    assert (tmp_path / "file").read_text() == "before\nwithin\nafter\n"


def test_streams_without_a_file_descriptor_are_unchanged(capsys):
    out = sys.stdout
    with BackgroundOutput():
        print("captured")
        assert sys.stdout is out
    assert capsys.readouterr().out == "captured\n"


def test_a_closed_output_pipe_does_not_end_the_job(tmp_path, pipe, capsys):
    os.close(pipe[0])
    with standard_output(pipe[1]), BackgroundOutput():
        console = Console(tmp_path, 1, "0", EventLoop())
        (tmp_path / "worker_0.log").write_text("a line\n")
        console.show()
        (tmp_path / "worker_0.log").write_text("a line\nanother\n")
        console.show()
        console.close()
        print("nor does this")
    assert capsys.readouterr().err.count("output is no longer shown") == 1


@pytest.mark.parametrize(
    ("stream", "shown"),
    # print() writes to standard output if its file is None.
    [("stdout", ("", "a message\n")), ("stderr", ("a message\na line\n", ""))],
)
def test_a_closed_standard_stream_does_not_end_the_job(tmp_path, monkeypatch, capsys, stream, shown):
    (tmp_path / "worker_0.log").write_text("a line\n")
    monkeypatch.setattr(sys, stream, None)
    with BackgroundOutput():
        print("a message", file=sys.stderr)
        console = Console(tmp_path, 1, "0", EventLoop())
        console.show_all(lambda: False)
        console.close()
    assert tuple(capsys.readouterr()) == shown
    assert getattr(sys, stream) is None


def test_text_streams_of_notebooks_get_the_output_of_ranks(tmp_path):
    (tmp_path / "worker_0.log").write_bytes("a line, \u00fc\n".encode() + b"\xff\n")
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        with BackgroundOutput():
            console = Console(tmp_path, 1, "0", EventLoop())
            console.show_all(lambda: False)
            console.close()
            print("a message", file=sys.stderr)
        assert (sys.stdout, sys.stderr) == (out, err)
    assert (out.getvalue(), err.getvalue()) == ("a line, \u00fc\n\ufffd\n", "a message\n")


@pytest.mark.parametrize("tee", ["0", "all"])
def test_a_log_is_read_no_faster_than_it_is_shown(tmp_path, pipe, tee):
    lines = [f"line {number} {'x' * 80}\n" for number in range(50_000)]
    (tmp_path / "worker_0.log").write_text("".join(lines) + "its last")
    found = []
    with standard_output(pipe[1]), BackgroundOutput():
        console = Console(tmp_path, 1, tee, EventLoop())
        for _ in range(10):
            console.show()
        held = sum(len(output._pending) for output in (sys.stdout.buffer,))
        reader = threading.Thread(target=read_all, args=(pipe[0], found))
        reader.start()
        console.show_all(lambda: False)
        console.close()
    os.close(pipe[1])
    reader.join()
    assert 0 < held <= 2 << 20
    front, end = ("[0] ", "\n") if tee == "all" else ("", "")
    assert b"".join(found).decode() == "".join(front + line for line in lines) + front + "its last" + end


def test_a_log_is_shown_to_its_end_for_a_slow_reader(tmp_path, pipe, monkeypatch):
    (tmp_path / "worker_0.log").write_bytes(os.urandom(3 * MORE_THAN_A_PIPE_TAKES))
    os.set_blocking(pipe[0], False)
    found, slept = [], []

    def read_once_it_was_asked(stream):
        is_unread = has_unwritten(stream)
        if slept:
            slept.clear()
            while has_unwritten(stream):
                found.append(os.read(pipe[0], 1 << 20))
        return is_unread

    monkeypatch.setattr("mindnlp_dp.launch.monitor.console.has_unwritten", read_once_it_was_asked)
    with standard_output(pipe[1]), BackgroundOutput():
        console = Console(tmp_path, 1, "0", SimpleNamespace(run_once=slept.append))
        console.show_all(lambda: False)
        found.append(os.read(pipe[0], 1 << 20))
        # Check this before close(), which waits for the reader for one second only.
        assert b"".join(found) == (tmp_path / "worker_0.log").read_bytes()
        console.close()


def test_long_and_unfinished_lines_are_shown(tmp_path, capfdbinary):
    (tmp_path / "worker_0.log").write_text("x" * (5 << 20) + "\nits last\nand no more")
    with BackgroundOutput():
        console = Console(tmp_path, 1, "all", EventLoop())
        console.show_all(lambda: False)
        with open(tmp_path / "worker_0.log", "a") as log:
            log.write(" but this")
        console.close()
    said = capfdbinary.readouterr().out
    assert said.count(b"x") == 5 << 20
    assert said.endswith(b"\n[0] its last\n[0] and no more but this\n")


def test_ctrl_c_ends_the_wait_for_a_reader_after_success(tmp_path, pipe):
    (tmp_path / "worker_0.log").write_bytes(bytes(3 * MORE_THAN_A_PIPE_TAKES))
    waits = []

    def interrupt_once(seconds):
        waits.append(seconds)
        if len(waits) == 1:
            raise KeyboardInterrupt

    with standard_output(pipe[1]), BackgroundOutput():
        console = Console(tmp_path, 1, "0", SimpleNamespace(run_once=interrupt_once, sleep=time.sleep))
        console.show_all(lambda: False)
        console.close()
    assert len(waits) == 1


def test_a_finished_attempt_does_not_wait_for_a_reader(tmp_path, pipe, capsys):
    (tmp_path / "worker_0.log").write_bytes(bytes(3 * MORE_THAN_A_PIPE_TAKES))
    with standard_output(pipe[1]), BackgroundOutput():
        console = Console(tmp_path, 1, "0", EventLoop())
        console.show()
        console.close()
        stop_waiting_for_readers()
    assert "no process reads this output" in capsys.readouterr().err
