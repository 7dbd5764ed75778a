"""Tests the homework: what its two scripts share, its settings, and its download."""

from __future__ import annotations

import contextlib
import difflib
import errno
import hashlib
import http.server
import importlib.util
import io
import re
import subprocess
import tarfile
import threading

import pytest

from mindnlp_dp.finetuning.settings import InputError, parse_config, read_config_file
from mindnlp_dp.text_classification.classification_config import FinetuneConfig, TaskConfig


@pytest.fixture
def homework(pytestconfig):
    return pytestconfig.rootpath / "homework"


def test_train_data_parallel_is_train_single_plus_seven_marked_lines(homework):
    single, parallel = (
        (homework / name).read_text().partition('"""\n\nimport sys')[2].splitlines()
        for name in ("train_single.py", "train_data_parallel.py")
    )
    changes = [line for line in difflib.ndiff(single, parallel) if line[0] in "+-?" and line[2:].strip()]
    assert all(line.startswith("+ ") and line.endswith("  # data parallel") for line in changes), changes
    assert len(changes) == 7


@pytest.mark.parametrize("name", ["README.md", "README.zh.md", "results.md"])
def test_paths_in_the_homework_texts_exist(homework, name):
    text = (homework / name).read_text(encoding="utf-8")
    links = re.findall(r"\]\(((?!https?:)[^)#]+)\)", text)
    named = re.findall(r"\b(?:scripts|configs|homework)/[\w.]+\w", text)
    assert links + named
    for path in links:
        assert (homework / path).exists(), path
    for path in named:
        assert (homework.parent / path).exists(), path
    assert "RESULTS" not in text


def test_every_config_is_valid_and_names_command_hardware_and_time(pytestconfig):
    files = sorted((pytestconfig.rootpath / "configs").glob("*.yaml"))
    assert len(files) >= 6
    for file in files:
        parse_config(FinetuneConfig if "quickstart" in file.name else TaskConfig, ["--config", str(file)])
        head = file.read_text().partition("output_dir")[0]
        for word in ("# command ", "# hardware ", "# time ", "# result ", "# run "):
            assert word in head, (file, word)
        assert re.search(r"\b(TIME|RESULT|TODO)\b", head) is None, file


def test_configs_for_one_process_and_two_devices_have_the_same_settings(pytestconfig):
    single, *others = (
        {
            **read_config_file(str(pytestconfig.rootpath / f"configs/banking77_{name}.yaml"), FinetuneConfig),
            "output_dir": "",
        }
        for name in ("single", "2npu", "2gpu")
    )
    assert all(other == single for other in others)


def test_flags_override_the_defaults_of_a_script():
    defaults = {"dataset": "hub/name", "model": "roberta-base", "learning_rate": 5e-5}
    scratch = {"learning_rate": 2e-3}

    def parsed(*flags):
        config = parse_config(TaskConfig, list(flags), defaults=defaults, from_scratch=scratch)
        return config.dataset, config.train_file, config.learning_rate

    assert parsed() == ("hub/name", "", 5e-5)
    assert parsed("--train-file", "a.csv", "--test-file", "b.csv") == ("", "a.csv", 5e-5)
    assert parsed("--dataset", "other", "--model", "tiny") == ("other", "", 2e-3)
    assert parsed("--model", "tiny", "--learning-rate", "0.1") == ("hub/name", "", 0.1)


def test_unknown_flags_and_config_keys_of_a_script_are_refused(capsys, tmp_path):
    with pytest.raises(SystemExit):
        parse_config(TaskConfig, ["--save-steps", "50"])
    assert "unrecognized arguments: --save-steps 50" in capsys.readouterr().err
    (tmp_path / "c.yaml").write_text("overlap: auto\n")
    with pytest.raises(InputError, match="unknown key 'overlap'; known are dataset, dropout, "):
        parse_config(TaskConfig, ["--config", str(tmp_path / "c.yaml")])


# Downloads of the emotion data from a local test server.

FILES = {
    "train.tsv": b"label\ttext_a\n0\ta\n2\tb\n",
    "dev.tsv": b"label\ttext_a\n1\tc\n",
    "test.tsv": b"label\ttext_a\n",
}


def archive_of(files):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"data/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return content.getvalue()


@pytest.fixture
def download(homework):
    spec = importlib.util.spec_from_file_location("download_emotion", homework / "download_emotion.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def server():
    """Serve ``server.content``, and declare ``server.length`` bytes as its length."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(self.server.length))
            self.end_headers()
            self.wfile.write(self.server.content)

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.content = archive_of(FILES)
        server.length = len(server.content)
        server.md5 = hashlib.md5(server.content).hexdigest()
        server.url = f"http://127.0.0.1:{server.server_port}/emotion.tar.gz"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_download_writes_the_published_files(download, server, tmp_path):
    download.fetch(tmp_path, server.url, server.md5)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.tsv")} == FILES


def test_an_interrupted_download_leaves_no_files(download, server, tmp_path):
    server.length += 10
    with pytest.raises(
        download.DownloadError, match=rf"was interrupted after {len(server.content)} bytes, 10 are missing"
    ):
        download.fetch(tmp_path, server.url, server.md5)
    assert list(tmp_path.iterdir()) == []


def test_an_archive_with_another_md5_is_refused(download, server, tmp_path):
    with pytest.raises(download.DownloadError, match="is not the archive that was published: its MD5 is"):
        download.fetch(tmp_path, server.url)
    assert list(tmp_path.glob("*.tsv")) == []


def test_a_full_disk_is_not_called_a_missing_network(download, server, tmp_path, monkeypatch):
    @contextlib.contextmanager
    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))
        yield

    monkeypatch.setattr(download, "atomic_write", full)
    with pytest.raises(OSError, match="No space left on device"):
        download.fetch(tmp_path, server.url, server.md5)


def test_a_download_without_network_advises_to_copy_the_archive(download, server, tmp_path):
    url = server.url.replace(str(server.server_port), "1")
    with pytest.raises(
        download.DownloadError, match=r"cannot be reached \(.*\); download it on a machine with a network"
    ):
        download.fetch(tmp_path, url, server.md5)
    # The message advises this.
    (tmp_path / "emotion.tar.gz").write_bytes(server.content)
    download.fetch(tmp_path, url, server.md5)
    assert (tmp_path / "train.tsv").read_bytes() == FILES["train.tsv"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", "outputs/banking77_2cpu"),
        ("--output-dir=a --config b.yaml", "a"),
        ("--config other.yaml", "elsewhere"),
        ("--config=none.yaml", "outputs/banking77_2cpu"),
        ("--config quoted.yaml", "quoted folder"),
    ],
)
def test_the_homework_scripts_find_the_output_folder(homework, tmp_path, flags, expected):
    (tmp_path / "other.yaml").write_text("num_epochs: 1\noutput_dir: elsewhere\n")
    (tmp_path / "quoted.yaml").write_text('output_dir: "quoted folder"  # another\n')
    command = f'source "$1/scripts/msrun_checks.sh"; output_dir "$1/configs/banking77_2cpu.yaml" {flags}'
    done = subprocess.run(["bash", "-euc", command, "-", homework.parent], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == f"{expected}\n", done.stderr
