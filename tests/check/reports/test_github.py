"""Annotations and the step summary, as a GitHub runner reads them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject, SearchStrategy
from markdown_it import MarkdownIt

from entrenar_py.check.reports import github
from entrenar_py.check.reports.report import Report
from entrenar_py.shared.errors import UsageError

COMMAND = re.compile(r"::(error|warning|notice) ((?:\w+=[^:,]*)(?:,\w+=[^:,]*)*)::(.*)")


def lines_of(report: Report, *, allow_inconclusive: bool = False) -> list[str]:
    """Return the annotations of a report, with paths relative to this folder."""
    root = Path.cwd()
    return [*github.annotate(report, root=root, allow_inconclusive=allow_inconclusive)]


def test_lines_of(full: Report) -> None:
    """Annotations come worst first, at the clause's line, with line ends escaped."""
    falsified, inconclusive = lines_of(full)
    place = "file=contracts/distributed-training-v1.yaml,line=70,col=5"
    assert falsified.startswith(f"::error {place},title=F-DP-005 falsified::rank 1 holds other")
    assert "%0Aat: step 3, rank 1, shard 2, tensor weight[0]" in falsified
    assert inconclusive.startswith("::warning file=")
    assert lines_of(full, allow_inconclusive=True)[1].startswith("::notice file=")


@given(data=st.data(), allow_inconclusive=st.booleans())
def test_any_text_is_one_command(
    data: DataObject, any_report: SearchStrategy[Report], allow_inconclusive: bool
) -> None:
    """Any text from a contract gives one workflow command a line."""
    report = data.draw(any_report)
    lines = lines_of(report, allow_inconclusive=allow_inconclusive)
    for line in lines:
        assert not re.search(r"[\r\n]", line)
        assert COMMAND.fullmatch(line), line
    loud = any(not line.startswith("::notice") for line in lines)
    assert loud == (report.exit_code(allow_inconclusive=allow_inconclusive) != 0)


def test_what_looks_escaped_is_not(full: Report) -> None:
    """A reason that contains `%0A` is shown as it is, and not as a line end."""
    entry = full.entries[3]
    finding = replace(entry.finding, reason="off by 50%0A")
    (line,) = lines_of(replace(full, entries=(replace(entry, finding=finding),)))
    assert "::off by 50%250A%0Aat: step 3" in line


def test_annotation_outside_the_checkout(full: Report, tmp_path: Path) -> None:
    """The annotation is printed without file and line."""
    lines = [*github.annotate(full, root=tmp_path, allow_inconclusive=False)]
    assert [line.partition(",")[0] for line in lines] == [
        "::error title=F-DP-005 falsified::rank 1 holds other weights than rank 0%0Aat: step 3",
        "::warning title=F-DP-002 inconclusive::the trace has no shard events%0Acontract: "
        "contracts/distributed-training-v1.yaml:40%0Astatement: Sharding covers every sample "
        "exactly once holds",
    ]


@given(data=st.data())
def test_summary_is_plain_text(data: DataObject, any_report: SearchStrategy[Report]) -> None:
    """No text from a contract becomes Markdown or HTML, and every row has its cells."""
    report = data.draw(any_report)
    tokens = (
        MarkdownIt("commonmark", {"html": True})
        .enable("table")
        .parse(github.summary(report, allow_inconclusive=False))
    )
    kinds = [token.type for token in tokens]
    inner = [child.type for token in tokens for child in token.children or ()]
    assert not {"html_block", "html_inline", "link_open", "image", "code_inline", "em_open"} & {
        *kinds,
        *inner,
    }
    assert kinds.count("td_open") == 5 * len(report.entries)


def test_summary(full: Report) -> None:
    """The summary has the verdicts as a table, the evidence, the gate and the command."""
    text = github.summary(full, allow_inconclusive=False)
    assert "| ❌ falsified | F\\-DP\\-005 | Loss parity with one worker | P1 | 1\\,204 |" in text
    assert "\nat: step 3, rank 1, shard 2, tensor weight[0]" in text
    assert "Gate QA\\-DT\\-001 \\(Distributed training\\) over 3 clauses\\: NOT PASSED" in text
    assert f"\n{full.command}\n" in text


def test_summary_is_appended(full: Report, tmp_path: Path) -> None:
    """The text of other steps is kept; without a runner there is no file to append to."""
    path = tmp_path / "summary.md"
    path.write_text("before\n", encoding="utf-8")
    assert github.summary_path({"GITHUB_STEP_SUMMARY": str(path)}) == path
    github.append(github.summary(full, allow_inconclusive=False), path)
    assert path.read_text(encoding="utf-8") == "before\n" + github.summary(
        full, allow_inconclusive=False
    )
    with pytest.raises(UsageError, match="not a step of a GitHub workflow"):
        github.summary_path({})
    with pytest.raises(UsageError, match="can't be written"):
        github.append("", tmp_path)
