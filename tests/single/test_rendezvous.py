"""Tests how the hosts of a job join it, how many ranks each has, and how `mindnlp-dp run` reads its command line."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from mindnlp_dp.commands.main import main
from mindnlp_dp.launch.errors import LaunchError, TemporaryError
from mindnlp_dp.launch.event_loop import EventLoop
from mindnlp_dp.launch.membership import Membership, MinMax
from mindnlp_dp.launch.options import rendezvous_of
from mindnlp_dp.launch.processes.attempt import Attempt, HostReport
from mindnlp_dp.launch.processes.environment import clean_environment
from mindnlp_dp.launch.processes.exit_status import ExitedProcess
from mindnlp_dp.launch.processes.local_host import LocalHost
from mindnlp_dp.launch.processes.spawn import start_mpi
from mindnlp_dp.launch.rendezvous.client import HostAgent, connect
from mindnlp_dp.launch.rendezvous.protocol import (
    AuthenticationError,
    Connection,
    address_of,
    is_this_host,
    listen_at,
    parse_endpoint,
    read_token,
)
from mindnlp_dp.launch.rendezvous.remote_shell import command as remote_shell
from mindnlp_dp.launch.rendezvous.server import Rendezvous, RendezvousServer
from mindnlp_dp.launch.termination import Termination
from mindnlp_dp.runtime.heartbeat import RankHeartbeat
from mindnlp_dp.runtime.launch_env import node_rank_of

TOKEN = b"0123456789abcdef"


@pytest.fixture
def ends():
    """Return a function that makes the server's and the client's end of a connection."""
    made = []

    def make(of_server=TOKEN, of_client=TOKEN):
        left, right = socket.socketpair()
        made.extend([left, right])
        return Connection(left, of_server, is_server=True), Connection(right, of_client, is_server=False)

    yield make
    for sock in made:
        sock.close()


def greet(*ends):
    for _ in range(3):
        for end in ends:
            end.flush()
            assert end.receive() == []


@pytest.mark.core
def test_rendezvous_messages_arrive_complete_and_in_order(ends):
    server, client = ends()
    greet(server, client)
    client.send({"say": "first", "text": "ä" * 100_000})
    greeted = []
    while not greeted:
        server.flush()
        greeted = server.receive()
        client.flush()
        assert client.receive() == []
    assert greeted == [{"say": "first", "text": "ä" * 100_000}]
    for number in range(50):
        server.send({"number": number})
    assert client.receive() == [{"number": number} for number in range(50)]
    client.close()
    with pytest.raises(EOFError):
        server.receive()


@pytest.mark.parametrize("tokens", [(TOKEN, b"f" * 16), (b"f" * 16, TOKEN)])
def test_a_wrong_token_is_refused(ends, tokens):
    server, client = ends(*tokens)
    with pytest.raises(AuthenticationError, match="does not have this job's token"):
        greet(server, client)
    assert not server.is_ready


JOIN = {
    "say": "join", "name": "b", "slots": 1, "job": "", "version": "1", "node_rank": None, "device": "CPU",
    "launcher": "x",
}  # fmt: skip


def join(server, **said):
    """Connect to a server, prove the token, and send the first message."""
    address = server._listening.getsockname()[:2]
    connection = Connection(socket.create_connection(address), TOKEN, is_server=False)
    deadline = time.monotonic() + 10
    while not connection.is_ready and time.monotonic() < deadline:
        server._loop.run_once(0.01)
        connection.receive()
    assert connection.is_ready
    connection.send({**JOIN, **said})
    return connection


@pytest.fixture
def meeting():
    """Return a head and a function that connects to it and joins."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = RendezvousServer(Rendezvous("127.0.0.1", port, TOKEN), "1", EventLoop(), device="CPU")

    def come(**said):
        return join(server, **said)

    yield server, come
    server.close(0)


def test_a_host_with_another_device_is_refused(meeting):
    """Its ranks would wait for the others over another library."""
    server, come = meeting
    connection, heard = come(device="Ascend"), []
    server._loop.run_until(lambda: bool(heard.extend(connection.receive()) or heard), 10)
    said = "its ranks would use Ascend, and those of the endpoint's host CPU; set the same DEVICE_TARGET on every host"
    assert heard == [{"do": "over", "code": 2, "why": said}]
    assert server.hosts == []


@pytest.mark.parametrize("speaks", [False, True])
@pytest.mark.parametrize("late", [0, 0.5, 4])
def test_every_host_receives_the_exit_code_at_the_end_of_the_job(meeting, late, speaks):
    server, come = meeting
    connection = come()
    while not server.hosts:
        server._loop.run_once(0.01)
    report = {"say": "report", "attempt": 0, "report": {"text": "x" * 1000}, "has_ended": False, "terminates": False}
    for _ in range(50):
        connection.send(report)
    heard = []

    def listen():
        time.sleep(late)
        with contextlib.suppress(EOFError):
            while True:
                if speaks:
                    with contextlib.suppress(OSError):
                        connection.send(report)
                heard.extend(connection.receive())
                time.sleep(0.01)
        connection.socket.close()

    listener = threading.Thread(target=listen)
    listener.start()
    began = time.monotonic()
    server.close(3)
    # The head does not wait for a client that does not listen.
    assert time.monotonic() - began < 3.5
    listener.join()
    assert [said for said in heard if said["do"] == "over"] == [{"do": "over", "code": 3, "why": ""}]


def test_a_refused_host_receives_the_reason(meeting):
    server, come = meeting
    connection = come(version="2")
    for _ in range(50):
        connection.send({"say": "report", "attempt": 0, "report": {"text": "x" * 1000}})
    server._loop.run_once(0.1)
    assert not server.hosts
    deadline = time.monotonic() + 5
    heard = []
    while not heard and time.monotonic() < deadline:
        server._loop.run_once(0.01)
        heard = connection.receive()
    assert heard[-1]["code"] == 2
    assert "it has mindnlp_dp 2" in heard[-1]["why"]


@pytest.mark.parametrize("is_known", [True, False])
def test_a_message_that_is_too_long_is_refused(ends, monkeypatch, is_known):
    monkeypatch.setattr("mindnlp_dp.launch.rendezvous.protocol.LONGEST_BYTES", 10_000)
    server, client = ends()
    if is_known:
        greet(server, client)
    client.socket.send(b"x" * 10_001)
    with pytest.raises(AuthenticationError, match=f"a message of more than {10_000 if is_known else 1024} bytes"):
        server.receive()


def test_invalid_connections_are_refused_and_do_not_block_a_host(capsys):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = RendezvousServer(Rendezvous("127.0.0.1", port, TOKEN), "1", EventLoop(), device="CPU")
    try:
        with pytest.raises(LaunchError, match=f"cannot listen at port {port} of the endpoint"):
            RendezvousServer(Rendezvous("127.0.0.1", port, TOKEN), "1", EventLoop(), device="CPU")
        noisy = socket.create_connection(("127.0.0.1", port))
        noisy.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        noisier = socket.create_connection(("127.0.0.1", port))
        noisier.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        silent = socket.create_connection(("127.0.0.1", port))
        joined = join(server)
        other = join(server, version="2", launcher="y")
        heard, deadline = [], time.monotonic() + 10
        while (not server.hosts or not any(h["do"] == "over" for h in heard)) and time.monotonic() < deadline:
            server._loop.run_once(0.01)
            joined.receive()
            heard += other.receive()
        assert [host.name for host in server.hosts] == ["b"]
        assert "it has mindnlp_dp 2, the endpoint's host 1" in heard[-1]["why"]
        noisy.settimeout(5)
        with pytest.raises((ConnectionError, AssertionError)):
            # The connection sends its greeting and is then closed.
            while noisy.recv(1024):
                pass
            raise AssertionError
        # The same launcher joins over another connection: its first connection is dropped.
        first, deadline = server.hosts[0], time.monotonic() + 10
        again = join(server)
        while server.hosts != [] and server.hosts[0] is first and time.monotonic() < deadline:
            server._loop.run_once(0.01)
            again.receive()
        assert (len(server.hosts), first.lost) == (1, "its launcher joined again")
        assert server.hosts[0] is not first
        again.socket.close()
        server._loop.run_until(lambda: not server.hosts, 5)
        assert server.hosts == []
        for sock in (joined.socket, silent, noisier):
            sock.close()
    finally:
        server.close(0)
    assert capsys.readouterr().err == "a process at 127.0.0.1 does not have this job's token, and was refused\n"


def test_a_host_report_is_converted_to_the_clock_of_its_reader():
    now = time.monotonic()
    report = HostReport(
        {
            3: RankHeartbeat(
                changes=7, pid=1, update=5, has_joined=True, changed=now - 2, since=now - 1, loss=0.5, blocked_in="x",
                exit_code=1, ended=now - 3, waited=True,
            )
        },
        [ExitedProcess(3, -9)], True, [3],
    )  # fmt: skip
    again = HostReport.from_json(json.loads(json.dumps(report.to_json())))
    assert again.ranks[3].changed == pytest.approx(now - 2, abs=0.5)
    assert again.ranks[3].since == pytest.approx(now - 1, abs=0.5)
    assert again.ranks[3].ended == pytest.approx(now - 3, abs=0.5)
    assert (again.ranks[3].exit_code, again.ranks[3].waited) == (1, True)
    assert (again.ended, again.all_ended, again.stopped) == (report.ended, True, [3])
    assert HostReport.from_json(json.loads(json.dumps(HostReport({0: RankHeartbeat()}).to_json()))).ranks[0].since == 0


def test_the_ranks_of_a_host_follow_those_of_earlier_hosts():
    attempt = Attempt(0, "mpi", ["x"], "logs", [2, 3, 1], index=1)
    assert (attempt.num_ranks, list(attempt.ranks)) == (6, [2, 3, 4])


def test_an_elastic_job_has_fewer_ranks_after_losing_one():
    for wrong in ("0", "2:1", "a", "1:", ":2", "-1", "1:2:3", ""):
        with pytest.raises(ValueError, match="MIN:MAX"):
            MinMax.parse(wrong)
    local = LocalHost({}, 3, loop := EventLoop())
    members = Membership(local, None, loop, nnodes=MinMax(1, 1), nproc=MinMax(1, 3), grow_after=0.5)
    assert members.counts([local]) == [3]
    for expected in (2, 1, 1):
        members.note_lost_rank(local)
        assert members.counts([local]) == [expected]
    assert not members.could_grow(1)
    time.sleep(0.6)
    assert members.could_grow(1)
    fixed = Membership(local, None, loop, nnodes=MinMax(1, 1), nproc=MinMax(2, 2), grow_after=0.5)
    fixed.note_lost_rank(local)
    assert (fixed.counts([local]), fixed.is_elastic) == ([2], False)


def test_missing_short_and_readable_tokens_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "token"
    with pytest.raises(ValueError, match="none was found .* openssl rand -hex 32"):
        read_token({}, path)
    path.write_text("0123456789abcdef\n")
    path.chmod(0o644)
    with pytest.raises(ValueError, match="can be read by other users: chmod 600"):
        read_token({}, path)
    path.chmod(0o600)
    assert read_token({"MINDNLP_DP_RDZV_TOKEN": "other"}, path) == b"0123456789abcdef"
    if os.geteuid() == 0:
        # Kubernetes mounts it like this: owned by root, and readable by the pod's group.
        path.chmod(0o440)
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: 1000)
            assert read_token({}, path) == b"0123456789abcdef"
        with pytest.raises(ValueError, match="can be read by other users"):
            read_token({}, path)
    with pytest.raises(ValueError, match="has 5 characters, and needs 16"):
        read_token({"MINDNLP_DP_RDZV_TOKEN": "short"})


@pytest.mark.parametrize("text", ["", ":1", "host:", "host:0", "host:70000", "host:x"])
def test_invalid_endpoints_are_refused(text):
    with pytest.raises(ValueError, match="an endpoint is HOST:PORT"):
        parse_endpoint(text)


def test_is_this_host_recognizes_local_addresses():
    assert is_this_host("127.0.0.1")
    assert is_this_host("localhost")
    assert not is_this_host("192.0.2.1")  # an address of no host (RFC 5737)
    assert not is_this_host("no.such.host.invalid")


@pytest.mark.parametrize("name", ["JOB_COMPLETION_INDEX", "VC_TASK_INDEX", "MS_NODE_RANK", "SLURM_NODEID"])
def test_the_node_rank_is_read_from_scheduler_variables(name):
    assert node_rank_of({name: "3"}) == 3
    assert node_rank_of({name: ""}) is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--nnodes 2", "--rdzv-endpoint HOST:PORT"),
        ("--rdzv-endpoint 192.0.2.1:29400", "this host would be a separate job"),
        ("--node-rank 1", "this host would be a separate job"),
        ("--nnodes 2 --standalone --rdzv-endpoint a:1", "--standalone is for one host"),
        ("--nnodes 2 --rdzv-endpoint a:b:c", "an endpoint is HOST:PORT"),
        ("--nnodes 2 --rdzv-endpoint a:1 --rdzv-conf x=1", "--rdzv-conf takes join_timeout"),
        ("--nnodes 2 --rdzv-endpoint a:1 --rdzv-conf join_timeout=nan", "--rdzv-conf takes join_timeout"),
    ],
)
def test_contradicting_options_are_refused(line, message, capsys, monkeypatch):
    monkeypatch.setenv("MINDNLP_DP_RDZV_TOKEN", TOKEN.decode())
    assert main(["run", "--nproc", "1", *line.split(), __file__]) == 2
    assert message in capsys.readouterr().err


def test_torchrun_options_have_the_same_meaning(monkeypatch):
    from mindnlp_dp.commands.main import _parser

    monkeypatch.setenv("MINDNLP_DP_RDZV_TOKEN", TOKEN.decode())
    words = "--nnodes=1:4 --nproc_per_node=2 --rdzv_id=j --rdzv_endpoint=n0:123 --max-restarts=3 --log_dir=l --tee all"
    args = _parser().parse_args(["run", *words.split(), "--node_rank", "1", "-m", "pkg.train", "--lr", "1"])
    assert (args.nnodes, args.nproc, args.max_restarts) == (MinMax(1, 4), MinMax(2, 2), 3)
    assert (args.module, args.command) == (True, ["pkg.train", "--lr", "1"])
    meet = rendezvous_of(args)
    assert (meet.host, meet.port, meet.job, meet.lost_after) == ("n0", 123, "j", 10.0)
    args = _parser().parse_args(["run", "--nproc", "1", "--nnodes", "2", "--master-addr", "n1", "x.py"])
    assert (rendezvous_of(args).host, rendezvous_of(args).port) == ("n1", 29400)
    args = _parser().parse_args(["run", "--nproc", "1", "--standalone", "x.py"])
    assert rendezvous_of(args) is None


@pytest.mark.parametrize(
    "line",
    [
        "--standalone", "--rdzv-endpoint localhost:0", "--nnodes 1:1 --rdzv-backend c10d --rdzv_endpoint=[::1]:29400",
        "--nnodes=1 --node_rank=0 --master_addr=127.0.0.1 --master_port=29500 --monitor-interval 5 --role=trainer",
    ],
)  # fmt: skip
def test_torchrun_commands_for_one_host_need_no_token(line, monkeypatch):
    from mindnlp_dp.commands.main import _parser

    monkeypatch.delenv("MINDNLP_DP_RDZV_TOKEN", raising=False)
    args = _parser().parse_args(["run", "--nproc_per_node=2", *line.split(), "x.py", "--role", "of the script"])
    assert rendezvous_of(args) is None
    assert args.command[1:] == ["--role", "of the script"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--no-python", "start another program from a script"),
        ("--redirects 3", "worker_R.log"),
        ("-r 1:3", "worker_R.log"),
        ("-t 3", "worker_R.log"),
        ("--local_ranks_filter=0", "worker_R.log"),
        ("--local-addr h", "--rdzv-endpoint"),
        ("--rdzv-backend etcd", "choose from"),
        ("--no-such-thing", "unrecognized option --no-such-thing"),
    ],
)
def test_unsupported_torchrun_options_are_refused_with_advice(line, message, capsys):
    with pytest.raises(SystemExit):
        main(["run", "--nproc", "2", *line.split(), "x.py"])
    said = capsys.readouterr().err
    assert message in said
    assert "usage: mindnlp-dp run --nproc N" in said


def test_nproc_per_node_auto_counts_devices_or_cores(monkeypatch, capsys):
    from mindnlp_dp.commands.main import _parser

    def nproc(text):
        return _parser().parse_args(["run", "--nproc-per-node", text, "x.py"]).nproc

    cores = len(os.sched_getaffinity(0))
    monkeypatch.setenv("DEVICE_TARGET", "CPU")
    assert nproc("auto") == nproc("cpu") == MinMax(cores, cores)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,1,5")
    monkeypatch.setenv("DEVICE_TARGET", "Ascend")
    assert nproc("auto") == nproc("npu") == MinMax(3, 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for text, device, message in [
        ("gpu", "GPU", "this host has no GPU cards to use"), ("auto", "cpu", "DEVICE_TARGET is cpu, expected"),
        ("npu", "CPU", "npu: ranks would use CPU; set DEVICE_TARGET=Ascend"),
    ]:  # fmt: skip
        monkeypatch.setenv("DEVICE_TARGET", device)
        with pytest.raises(SystemExit):
            nproc(text)
        assert message in capsys.readouterr().err


def test_too_few_hosts_within_join_timeout_end_the_launcher(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MINDNLP_DP_RDZV_TOKEN", TOKEN.decode())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("")
    line = "run --nproc 1 --nnodes 2 --rdzv-conf join_timeout=0.3 script.py --rdzv-endpoint"
    assert main([*line.split()[:-2], "--rdzv-endpoint", "127.0.0.1:0", "script.py"]) == 2
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert main([*line.split()[:-2], "--rdzv-endpoint", f"127.0.0.1:{port}", "script.py"]) == TemporaryError.exit_code
    assert f"1 of 2 hosts have joined at 127.0.0.1:{port} in 0 s" in capsys.readouterr().err
    assert main([*line.split()[:-2], "--rdzv-endpoint", f"127.0.0.1:{port}", "--node-rank", "1", "script.py"]) == 75
    assert "cannot be reached" in capsys.readouterr().err


def test_a_host_has_at_most_the_ranks_of_its_own_nproc():
    local, other = LocalHost({}, 4, loop := EventLoop()), SimpleNamespace(name="b", address="10.0.0.2", slots=2)
    members = Membership(local, None, loop, nnodes=MinMax(2, 2), nproc=MinMax(4, 4), grow_after=60)
    assert members.counts([local, other]) == [4, 2]
    elastic = Membership(local, None, loop, nnodes=MinMax(1, 2), nproc=MinMax(3, 8), grow_after=60)
    elastic.note_lost_rank(local)
    assert elastic.counts([local, other]) == [3, 2]


def test_silent_connections_do_not_prevent_a_host_from_joining(meeting):
    """Check this also for clients that connect again and again from the host's own address."""
    server, come = meeting
    port = server._listening.getsockname()[1]
    silent, until = [], time.monotonic() + 60
    is_over = threading.Event()

    def call_on():
        while not is_over.is_set() and time.monotonic() < until:
            with contextlib.suppress(OSError):
                silent.append(socket.create_connection(("127.0.0.1", port)))
            while len(silent) > 200:
                silent.pop(0).close()
            time.sleep(0.001)

    caller = threading.Thread(target=call_on)
    caller.start()
    try:
        while not server.hosts and time.monotonic() < until:
            with contextlib.suppress(OSError, EOFError):
                come()
        assert [host.name for host in server.hosts] == ["b"]
        assert len(server._strangers) <= 64
    finally:
        is_over.set()
        caller.join()
        for sock in silent:
            sock.close()


def test_an_endpoint_that_closes_connections_is_not_reported_as_a_wrong_token(monkeypatch):
    monkeypatch.setattr("mindnlp_dp.launch.rendezvous.client._RETRY_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        is_over = threading.Event()
        listening.settimeout(0.1)

        def hang_up():
            while not is_over.is_set():
                with contextlib.suppress(OSError):
                    listening.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        try:
            with pytest.raises(TemporaryError, match="closed the connection before it asked for a token"):
                connect(Rendezvous("127.0.0.1", listening.getsockname()[1], TOKEN), 0.3)
        finally:
            is_over.set()
            thread.join()


class SlowHost:
    """A host that takes longer to end its ranks than the head waits for a silent host."""

    name, number = "b", 0

    def __init__(self, loop):
        self._loop, self.is_ending = loop, False

    def poll(self):
        return HostReport()

    def start(self, attempt):
        pass

    def end(self):
        self.is_ending = True
        self._loop.sleep(2.5)

    def leave(self):
        pass


def test_a_host_that_ends_its_ranks_slowly_is_not_lost(meeting):
    server, _ = meeting
    port = server._listening.getsockname()[1]
    rendezvous = Rendezvous("127.0.0.1", port, TOKEN, lost_after=1.0)
    server.rendezvous = rendezvous
    loop = EventLoop()
    agent = HostAgent(rendezvous, {}, 1, loop, version="1", node_rank=1, termination=Termination())
    agent._host = SlowHost(loop)
    codes = []
    thread = threading.Thread(target=lambda: codes.append(agent.run()))
    thread.start()
    while not server.hosts:
        server._loop.run_once(0.05)
    [host] = server.hosts
    host.start(Attempt(0, "mpi", ["x.py"], "logs", [1, 1], ["a", "b"], index=1))
    host.end()
    assert (host.lost, server.hosts) == ("", [host])
    server.close(7)
    thread.join(10)
    assert codes == [7]


def test_a_host_reconnects_to_an_endpoint_lost_while_ending_its_ranks(meeting):
    server, _ = meeting
    rendezvous = Rendezvous("127.0.0.1", server._listening.getsockname()[1], TOKEN)
    loop = EventLoop()
    agent = HostAgent(rendezvous, {}, 1, loop, version="1", node_rank=1, termination=Termination())
    agent._host = host = SlowHost(loop)
    codes = []
    thread = threading.Thread(target=lambda: codes.append(agent.run()))
    thread.start()
    server._loop.run_until(lambda: server.hosts, 10)
    [first] = server.hosts
    first.say(do="end", number=-1)
    server._loop.run_until(lambda: host.is_ending, 10)
    first.lost = "the connection broke"
    server._loop.run_until(lambda: server.hosts and server.hosts[0] is not first, 10)
    assert [host.launcher for host in server.hosts] == [first.launcher]
    server.close(7)
    thread.join(10)
    assert codes == [7]


def test_the_event_loop_sleeps_after_the_rendezvous_is_closed(meeting):
    server, come = meeting
    come()
    socket.create_connection(("127.0.0.1", server._listening.getsockname()[1])).close()
    server.close(1)
    began = time.monotonic()
    server._loop.sleep(0.1)
    assert time.monotonic() - began >= 0.1


def test_a_daemon_requested_without_an_attempt_is_not_started(tmp_path):
    host = LocalHost({}, 1, EventLoop())
    host.run_daemon("exit 1")
    assert not host._daemons


def test_a_launcher_that_continues_after_sigstop_loses_no_host(meeting):
    server, come = meeting
    connection = come()
    while not server.hosts:
        server._loop.run_once(0.01)
    connection.send({"say": "answer", "answer": ""})
    # The state after SIGSTOP, or after a disk did not respond.
    server._loop._handled -= 60
    server.hosts[0].heard -= 60
    server._loop.run_once(0.01)
    assert [host.lost for host in server.hosts] == [""]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "localhost", "service.example"])
def test_an_endpoint_with_a_loopback_address_listens_only_there(address):
    listening = listen_at(address, 0)
    port = listening.getsockname()[1]
    only = {"127.0.0.1": ["127.0.0.1"], "::1": ["::1"]}.get(address, ["127.0.0.1", "::1"])
    try:
        for own in ("127.0.0.1", "::1"):
            if own in only:
                with socket.create_connection((own, port), timeout=5), listening.accept()[0] as there:
                    # mpirun and users write the address in this form.
                    assert address_of(there.getpeername()) == own
            else:
                with pytest.raises(OSError, match="refused"):
                    socket.create_connection((own, port), timeout=5)
    finally:
        listening.close()


@pytest.mark.parametrize("address", ["0.0.0.0:29400", "[::]:29400"])
def test_a_wildcard_address_is_refused_as_endpoint(address):
    with pytest.raises(ValueError, match="an address of one host"):
        parse_endpoint(address)


def test_ipv6_hosts_are_refused_under_mpirun(tmp_path):
    with pytest.raises(LaunchError, match=r"does not take IPv6 addresses \(fd00::1\)"):
        start_mpi({"fd00::1": 1, "10.0.0.1": 1}, [], {}, None, scratch=tmp_path, remote_shell=[])


def test_the_environment_of_a_rank_does_not_contain_the_token():
    found = clean_environment({"MINDNLP_DP_RDZV_TOKEN": TOKEN.decode(), "HOME": "/root"})
    assert found["HOME"] == "/root"
    assert not any(TOKEN.decode() in value for value in found.values())


def test_the_token_of_the_remote_shell_is_in_a_private_file(tmp_path):
    line = remote_shell("127.0.0.1:29400", TOKEN, tmp_path)
    [file] = tmp_path.iterdir()
    assert line[-1] == str(file)
    # mpirun splits its command line at colons.
    assert not any(part in " ".join(line) for part in (":", TOKEN.decode()))
    assert file.read_text() == f"127.0.0.1:29400\n{TOKEN.decode()}\n"
    assert file.stat().st_mode & 0o777 == 0o600
