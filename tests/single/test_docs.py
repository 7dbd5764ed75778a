"""Tests what docs/ says about the source: files, settings, public names, messages; and each measured number once."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path

import pytest
import yaml

import mindnlp_dp as dp
from mindnlp_dp import optim
from mindnlp_dp.finetuning.settings import ParallelConfig, RunConfig
from mindnlp_dp.language_modeling.language_modeling_config import LanguageModelingConfig
from mindnlp_dp.text_classification.classification_config import FinetuneConfig, TaskConfig

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, DOCS = ROOT / "mindnlp_dp", ROOT / "docs"


def read(path):
    return path.read_text(encoding="utf-8")


def hooks():
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- architecture.md ---


def test_the_list_of_files_is_up_to_date():
    """Python docs/hooks.py writes it."""
    listed = re.search(r"^mindnlp_dp/\n.*?(?=\n```$)", read(DOCS / "architecture.md"), re.DOTALL | re.MULTILINE)[0]
    assert listed == hooks().file_list(PACKAGE)
    assert [line for line in listed.splitlines()[1:] if len(line.split()) < 3] == []


def test_files_in_the_diagrams_exist():
    """Check that each file is named by its path in the package or by the end of that path."""
    files = [f"/{path.relative_to(ROOT).as_posix()}" for path in PACKAGE.rglob("*.py")]
    named = set(re.findall(r"[\w/]+\.py\b", read(DOCS / "architecture.md")))
    assert len(named) > 20
    named -= {"scripts/finetune.py", "scripts/finetune_llm.py", "docs/hooks.py"}
    assert [name for name in named if not any(file.endswith(f"/{name}") for file in files)] == []


def test_the_documented_layers_are_those_of_import_linter():
    told = re.search(r"^```\ncommands \| text.*?^```", read(DOCS / "architecture.md"), re.DOTALL | re.MULTILINE)[0]
    held = re.search(r"^layers = \[\n(.*?)^\]", read(ROOT / "pyproject.toml"), re.DOTALL | re.MULTILINE)[1]
    assert told.splitlines()[1:-1] == re.findall(r'"(.+)"', held)


# --- Chinese pages ---


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.zh.md")), ids=lambda page: page.name)
def test_chinese_pages_have_the_headings_code_and_links_of_the_english_ones(page):
    chinese, english = read(page), read(page.with_name(page.name.replace(".zh.md", ".md")))
    blocks = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    assert blocks.findall(chinese) == blocks.findall(english)
    outlines = [re.findall(r"^#+ ", blocks.sub("", text), re.MULTILINE) for text in (chinese, english)]
    assert outlines[0] == outlines[1]
    # The homework is not a page of the site, so its link names the language.
    links = [
        [link.replace("README.zh.md", "README.md") for link in re.findall(r"\]\(([^)#]+)", text)]
        for text in (chinese, english)
    ]
    assert sorted(links[0]) == sorted(links[1])


# --- course.md, and its chapters ---


@pytest.mark.core
@pytest.mark.parametrize(("page", "blocks"), [("course.md", 4), ("all_reduce.md", 3), ("scaling.md", 4)])
def test_python_examples_of_the_course_pages_give_what_the_pages_show(page, blocks):
    """Run the examples of a page one after the other, as a reader types them."""
    examples = re.findall(r"^```pycon\n(.*?)^```", read(DOCS / page), re.DOTALL | re.MULTILINE)
    assert len(examples) == blocks
    said = []
    test = doctest.DocTestParser().get_doctest("".join(examples), {}, page, page, 0)
    result = doctest.DocTestRunner().run(test, out=said.append)
    assert result.failed == 0, "".join(said)


@pytest.mark.parametrize("suffix", ["", ".zh"])
def test_the_picture_of_the_ring_shows_the_messages_of_a_run(suffix):
    """Compare the file with what its script draws from the messages of a ring all-reduce."""
    spec = importlib.util.spec_from_file_location("ring_all_reduce", DOCS / "images" / "ring_all_reduce.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert read(DOCS / "images" / f"ring_all_reduce{suffix}.svg") == script.drawing(script.TEXTS[suffix])


def test_commands_on_the_course_page_explain_the_algorithms():
    """Run each --explain of the page; its last lines have what the page says of the traffic."""
    names = re.findall(r"algorithms\.py --explain (\w+) --nproc 4", read(DOCS / "course.md"))
    assert sorted(names) == ["data_parallel", "parameter_server", "reduce_broadcast", "ring"]
    sys.path.insert(0, str(ROOT / "homework"))
    try:
        explain = importlib.import_module("theory.explain").explain
    finally:
        sys.path.remove(str(ROOT / "homework"))
    for name in names:
        sent = re.findall(r"rank \d sent \d messages?, (\S+) times the array, and", explain(name, 4))
        assert sent == (["1.50"] * 4 if name == "ring" else ["3.00", "1.00", "1.00", "1.00"]), name


# --- the landing page ---


@pytest.mark.parametrize(
    ("question", "page", "said"),
    [
        ("install on Ascend", "ascend.md", "set_env.sh"),
        ("my own CSV", "tutorials/your_data.md", "CSV"),
        ("resume", "tutorials/resuming.md", "--resume"),
        ("two hosts", "tutorials/two_hosts.md", "--nnodes 2"),
        ("out of memory", "memory.md", "gradient_checkpointing"),
        ("hang", "hangs.md", "--hang-timeout"),
        ("another loss", "data.md", "loss_weight"),
        ("LoRA", "tutorials/llm_lora.md", "--lora-rank"),
        ("export", "after_training.md", "mindnlp-dp export"),
        ("cite", "index.md", "CITATION.cff"),
    ],
)
def test_first_questions_are_answered_within_two_clicks(question, page, said):
    """Follow links from the landing page twice, to a page that has the command, setting or file."""

    def linked(pages):
        links = {
            (path.parent / link).resolve() for path in pages for link in re.findall(r"\]\(([^)#:]+\.md)", read(path))
        }
        return pages | {link for link in links if DOCS in link.parents}

    assert DOCS / page in linked(linked({DOCS / "index.md"})), question
    assert said in read(DOCS / page), question


# --- arguments.md and api.md ---


@pytest.mark.parametrize("kind", [RunConfig, ParallelConfig, TaskConfig, FinetuneConfig, LanguageModelingConfig])
def test_the_table_of_flags_matches_the_dataclass(kind):
    fields = {field.name: field for field in dataclasses.fields(kind)}
    expected = [(name, fields[name].default, fields[name].metadata["help"]) for name in kind.__annotations__]
    file = Path(inspect.getsourcefile(kind))
    rows = hooks().settings(file, kind.__name__)
    assert rows
    assert [(name, default, meaning) for name, _, default, meaning in rows] == expected
    assert f"<!-- flags: {file.relative_to(ROOT)} {kind.__name__} -->" in read(DOCS / "arguments.md")


def test_the_table_of_arguments_matches_the_dataclass():
    kind = dp.DataParallelArguments.__base__
    inherited = {field.name for field in dataclasses.fields(kind.__base__)}
    expected = [(f.name, f.default, f.metadata["help"]) for f in dataclasses.fields(kind) if f.name not in inherited]
    rows = hooks().settings(PACKAGE / "training" / "trainer" / "base_arguments.py", kind.__name__)
    assert len(rows) > 5
    assert [(name, default, meaning) for name, _, default, meaning in rows] == expected


def test_the_arguments_page_is_rendered_with_tables():
    page = hooks().on_page_markdown(read(DOCS / "arguments.md"))
    assert "<!--" not in page
    assert "| `--train-file` | `str` | `''` |" in page
    assert "| `overlap` |" in page


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("bucket_cap_mb", '<code class="name">bucket_<wbr>cap_<wbr>mb</code>'),
        ("--train-file", '<code class="name">--train-file</code>'),
        ("cp a/b /tmp", "<code>cp a/<wbr>b /tmp</code>"),
        (r"dp=2\|1", '<code class="name">dp=2|1</code>'),
        ("BertForMaskedLM", "<code>Bert<wbr>For<wbr>Masked<wbr>LM</code>"),
    ],
)
def test_inline_code_may_be_broken_between_words_only(code, expected):
    """Keep code blocks, which the browser wraps and the reader copies, as they are."""
    block = "<pre><span></span><code>bucket_cap_mb</code></pre>"
    assert hooks().on_page_content(f"{block}<td><code>{code}</code></td>") == f"{block}<td>{expected}</td>"


@pytest.mark.parametrize(
    ("cell", "is_number"),
    [
        ("3.9e-07", True),
        ("22.8 ms", True),
        ("<strong>125.2 ms</strong>", True),
        ("2 ranks, 3 hosts", False),
        ("yes", False),
    ],
)
def test_numbers_in_tables_are_not_broken(cell, is_number):
    marked = f'<td class="number">{cell}</td>'
    assert hooks().on_page_content(f"<td>{cell}</td>") == (marked if is_number else f"<td>{cell}</td>")


def test_a_setting_without_help_is_refused(tmp_path):
    (tmp_path / "config.py").write_text("class C:\n    size: int = 1\n")
    with pytest.raises(ValueError, match="size has no help"):
        hooks().settings(tmp_path / "config.py", "C")


def test_the_api_reference_lists_every_public_name():
    named = re.findall(r"^::: mindnlp_dp\.([\w.]+)$", read(DOCS / "api.md"), re.MULTILINE)
    assert len(set(named)) == len(named)
    # A function whose file has its name is named by the file, too: optim.parameter_groups.parameter_groups.
    functions = {re.sub(r"\b(\w+)\.\1$", r"\1", name) for name in named}
    assert {*dp.__all__, *(f"optim.{name}" for name in optim.__all__)} <= functions
    modules = [name for name in named if PACKAGE.joinpath(*name.split(".")).with_suffix(".py").exists()]
    assert modules == [], "the page shows the whole file: name the function by its file"
    for name in named:
        module, _, attribute = f"mindnlp_dp.{name}".rpartition(".")
        # Types that only public functions return are not attributes of the package itself.
        assert hasattr(importlib.import_module(module), attribute), name


def test_every_page_is_in_the_navigation_once():
    def pages(entry):
        if isinstance(entry, str):
            return [entry]
        return [page for item in (entry.values() if isinstance(entry, dict) else entry) for page in pages(item)]

    nav = pages(yaml.safe_load(read(ROOT / "mkdocs.yml"))["nav"])
    english = [page for page in DOCS.rglob("*.md") if not page.name.endswith(".zh.md")]
    assert sorted(nav) == sorted(page.relative_to(DOCS).as_posix() for page in english)


def first_paragraph(page):
    return read(page).split("\n\n")[1].replace("\n", " ")


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_each_page_begins_with_the_question_that_it_answers(page):
    """The landing page and the tutorials begin with what the package, or the reader, does."""
    if page.name not in ("index.md", "index.zh.md"):
        assert {"?", "\uff1f"} & set(first_paragraph(page)), first_paragraph(page)


@pytest.mark.parametrize("page", ["launching.md", *sorted(page.name for page in DOCS.glob("benchmarks*.md"))])
def test_pages_that_were_split_stay_below_250_lines(page):
    assert len(read(DOCS / page).splitlines()) <= 250


# --- benchmarks.md and its parts ---

BENCHMARKS = sorted(DOCS.glob("benchmarks*.md"))


def test_measured_numbers_are_only_on_the_benchmarks_pages():
    """Keep a changed number to one edit. Numbers of two digits are skipped: they may be versions, for example."""

    def decimals(text):
        return {number for number in re.findall(r"(?<![\w.,-])\d[\d,]*\.\d+(?![\w.])", text) if len(number) > 3}

    measured = decimals("\n".join(map(read, BENCHMARKS)))
    assert len(measured) > 80
    others = [ROOT / "README.md", ROOT / "README.zh.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    others += [page for page in DOCS.glob("*.md") if page not in BENCHMARKS]
    # The numbers that a plan, an estimate or an example prints are computed, and test_tutorials.py compares a
    # block of text with what its command prints.
    computed = re.compile(r"^```(\nmodel |console\n\$ mindnlp-dp estimate |pycon\n|text\n).*?^```$", re.M | re.S)
    texts = {page.name: computed.sub("", read(page)) for page in others}
    assert {name: both for name, text in texts.items() if (both := decimals(text) & measured)} == {}


@pytest.mark.parametrize("page", BENCHMARKS, ids=lambda page: page.name)
def test_every_section_of_measurements_names_its_command(page):
    sections = re.split(r"^## ", read(page), flags=re.MULTILINE)[1:]
    assert sections
    for section in sections:
        assert re.search(r"(?:benchmarks|scripts|tests)/\w+|bench_\w+\.(?:py|sh)", section), section.splitlines()[0]


def test_refused_and_ineffective_settings_are_documented():
    page = read(DOCS / "arguments.md")
    section = page[page.index("## What the Trainers refuse") : page.index("## scripts/finetune.py")]
    source = read(ROOT / "mindnlp_dp/training/trainer/mindnlp_0_5/arguments.py")
    source += read(ROOT / "mindnlp_dp/training/trainer/mindnlp_0_4/arguments.py")
    lists = re.findall(r"^(?:_NOT_HERE|_WITHOUT_EFFECT|_OF_PIPELINES) = \(([^)]+)\)", source, re.MULTILINE)
    names = [name for each in lists for name in re.findall(r'"(\w+)"', each)]
    assert len(lists) == 3
    assert [name for name in names if f"`{name}" not in section] == []


# --- troubleshooting.md ---


def test_chinese_error_messages_are_those_of_the_english_page():
    pages = [re.findall(r"^\| ``(.+?)`` \|", read(DOCS / name), re.M) for name in ("messages.md", "messages.zh.md")]
    assert pages[0] == pages[1]


@pytest.mark.parametrize(
    ("page", "row", "least"),
    [("troubleshooting.md", r"\| ``(.+?)`` \|$", 10), ("messages.md", r"^\| ``(.+?)`` \|", 80)],
    ids=["troubleshooting", "messages"],
)
def test_documented_error_messages_exist_in_the_source(page, row, least):
    """Match each message in the table to an f-string whose constant text is more than a third of the message."""
    templates = []
    for path in PACKAGE.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(read(path))))
        inner = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes:
            parts = node.values if isinstance(node, ast.JoinedStr) else [] if id(node) in inner else [node]
            words = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            if sum(map(len, words)) > 20:
                pattern = "".join(re.escape(part.value) if isinstance(part, ast.Constant) else ".*" for part in parts)
                templates.append((sum(map(len, words)), re.compile(pattern, re.DOTALL)))
    messages = [message.replace("\\|", "|") for message in re.findall(row, read(DOCS / page), re.MULTILINE)]
    assert len(messages) > least

    def is_known(message):
        found = [length for length, template in templates if template.search(message)]
        return max(found, default=0) > len(message) / 3

    assert [message for message in messages if not is_known(message)] == []


def test_documented_messages_of_mpi_and_mindspore_exist_in_their_libraries():
    """Look for each message in the library of MindSpore's cluster, and in the texts of OpenMPI's launcher."""
    said = re.findall(r"^\| `(\D[^`]+)` \| (MPI|MindSpore): ", read(DOCS / "troubleshooting.md"), re.MULTILINE)
    assert len(said) == 5
    mindspore = Path(importlib.util.find_spec("mindspore").origin).parent
    texts = {
        "MPI": b"".join(path.read_bytes() for path in Path(sys.prefix, "share", "prte").glob("help-*.txt")),
        "MindSpore": (mindspore / "lib/libmindspore_cluster.so").read_bytes(),
    }
    for message, library in said:
        assert message.encode() in texts[library], message


# --- ascend.md ---


def test_statements_about_ascend_have_a_source():
    """Check that each row about HCCL, CANN or their errors names a page, a wheel or a source file."""
    page = read(DOCS / "ascend.md")
    for title in ("Variables", "The likeliest errors"):
        rows = re.search(rf"^## {title}\n(.*?)^## ", page, re.DOTALL | re.MULTILINE)[1].splitlines()
        rows = [row for row in rows if re.match(r"\| .*[`\[]", row)]
        assert len(rows) > 9
        ours = ("| `DEVICE_TARGET`", "| `MINDNLP_DP_")
        assert [row for row in rows if not re.search(r"https://|wheel 2\.10", row) and not row.startswith(ours)] == []


def test_documented_cann_versions_are_accepted_by_mindspore():
    """Compare the row of the installed MindSpore with the list in its wheel."""
    mindspore = Path(importlib.util.find_spec("mindspore").origin).parent
    version = re.search(r"'(\d+\.\d+\.\d+)", read(mindspore / "version.py"))[1]
    row = re.search(rf"^\| {re.escape(version)} \| ([^|;]+)", read(DOCS / "ascend.md"), re.MULTILINE)
    assert row, f"docs/ascend.md has no row for MindSpore {version}"
    checker = re.search(
        r"^class AscendEnvChecker.*", read(mindspore / "run_check/_check_version.py"), re.DOTALL | re.M
    )[0]
    accepted = re.findall(r'"([\d.]+)"', re.search(r"self\.version = \[([^]]+)\]", checker)[1])
    told = {".".join(number.split(".")[:2]) for number in re.findall(r"\d+\.\d+(?:\.\w+)?", row[1])}
    assert told
    assert told <= set(accepted)


@pytest.mark.parametrize(
    ("message", "file"),
    [
        ("Unsupported device target ", "lib/libmindspore_core.so"),
        ("Memory not enough", "lib/libmindspore_memory_pool.so"),
        ("Malloc device memory failed", "lib/plugin/ascend/libmindspore_ascend_res_manager.so"),
        ("wheel was not installed correctly", "communication/management.py"),
    ],
)
def test_documented_ascend_messages_exist_in_mindspore(message, file):
    mindspore = Path(importlib.util.find_spec("mindspore").origin).parent
    assert message in read(DOCS / "ascend.md")
    assert message.encode() in (mindspore / file).read_bytes()


# --- what CI runs ---


def test_pre_commit_hooks_are_run_by_the_test_script():
    [repository] = yaml.safe_load(read(ROOT / ".pre-commit-config.yaml"))["repos"]
    assert repository["repo"] == "local"
    entries = [hook["entry"] for hook in repository["hooks"]]
    assert entries == ["ruff check .", "ruff format --check .", "codespell .", "mypy", "lint-imports"]
    script = read(ROOT / "scripts" / "test.sh")
    for hook in repository["hooks"]:
        assert hook["language"] == "system"
        assert hook["entry"] in script, hook["entry"]
