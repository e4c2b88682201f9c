"""What the site has beyond `docs/`: a page for each problem code, each command's help, a report.

All of it comes from where it is kept, so that no page can say something else than the program.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))

from mkdocs.structure.files import File, Files  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from ckptools.cli import app  # noqa: E402
from ckptools.cli.start import COMMANDS  # noqa: E402
from ckptools.explain import PAGES, Explanation, effect_of, explanations, sections_of  # noqa: E402
from ckptools.formats.registry import FORMATS, Format  # noqa: E402
from ckptools.model.records import grouped  # noqa: E402

REPORTED = ROOT / "fixtures" / "verl-fsdp2-bf16" / "ckpt"
REPORT = "broken-report.html"
FRAME = f'''<iframe class="report" src="{REPORT}" title="A report of a broken checkpoint"></iframe>

[Open this report alone]({REPORT})'''
"""A report that was written when the site was built, in place of its picture."""

PROJECT = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")

MOVED = (
    ("../ckptools/explain/problems.md", "problems/index.md"),
    *((f"../{name}", f"project/{name}") for name in PROJECT),
)
"""Links that lead out of `docs/` in the repository, and where they lead on the site."""


def on_config(config: Any) -> Any:
    """Put the page of each code into the navigation, and pages of commands that it lacks."""
    for entry in config.nav:
        if "Commands" in entry:
            there = {name for page in entry["Commands"] for name in page}
            new = [name for name in COMMANDS if name not in there and (ROOT / "docs" / f"{name}.md").exists()]
            entry["Commands"] += [{name: f"{name}.md"} for name in new]
        if "Problem codes" in entry:
            entry["Problem codes"] += [f"problems/{page.code}.md" for page in explanations()]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    files.append(File.generated(config, REPORT, content=_report()))
    for path, text in [*_problem_pages(), *_project_pages()]:
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put links right, and add what is generated to a page of a command or of a family of formats."""
    path = page.file.src_uri
    for there, here in MOVED:
        markdown = markdown.replace(f"]({there}", f"]({here}")
    if path == "report.md":
        markdown = re.sub(r"!\[.*\]\(images/report-light\.png\)", FRAME, markdown)
    if path.removesuffix(".md") in COMMANDS:
        markdown += f"\n\n## All options\n\n```text\n{_help_of(path.removesuffix('.md'))}\n```\n"
    if path.startswith("families/"):
        known = {f.NAME: _recognised(f) for f in FORMATS}
        markdown = re.sub(
            r"^## `(\w+)`$", lambda found: f"{found[0]}\n\n{known[found[1]]}", markdown, flags=re.MULTILINE
        )
    return markdown


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Take the worker of the search in a folder from the site itself; the theme would load it from another host."""
    return _with_own_worker(output, "../" * page.file.dest_uri.count("/"))


def on_post_template(output: str, template_name: str, **_: Any) -> str:
    """The same for the page that stands for one that is not there."""
    return _with_own_worker(output, "") if template_name == "404.html" else output


def _with_own_worker(html: str, root: str) -> str:
    shim = '<script src="https://unpkg.com/iframe-worker/shim"></script>'
    if shim not in html:
        raise ValueError("the theme no longer loads the worker that docs/javascripts/worker.js stands for")
    return html.replace(shim, f'<script src="{root}javascripts/worker.js"></script>')


def _recognised(known: Format) -> str:
    tried = f" Tried on {', '.join(known.TRIED)}." if known.TRIED else ""
    return f"*Known by {known.KNOWN_BY}.{tried}*"


def _report() -> str:
    """The report of a checkpoint of verl, of which the optimizer of one rank is lost and that of another is cut."""
    with tempfile.TemporaryDirectory() as folder:
        actor = Path(shutil.copytree(REPORTED, Path(folder, "run7"))) / "global_step_3" / "actor"
        (actor / "optim_world_size_4_rank_2.pt").unlink()
        os.truncate(actor / "optim_world_size_4_rank_3.pt", 20_000)
        for path in actor.iterdir():
            os.utime(path, (1_760_000_000, 1_760_000_000))
        words = ["report", "run7/global_step_3/actor", "-o", "report.html", "--deep", "--values", "--interactive"]
        done = subprocess.run([sys.executable, "-m", "ckptools", *words], cwd=folder, capture_output=True, text=True)
        if done.returncode != 1:
            raise ValueError(f"no report of a broken checkpoint: {done.stderr}")
        return Path(folder, "report.html").read_text("utf-8")


def _problem_pages() -> Iterator[tuple[str, str]]:
    sections = dict(sections_of(PAGES.read_text("utf-8")))
    for page in explanations():
        yield f"problems/{page.code}.md", _problem_page(page, sections[page.code])
    lines = ["# Problem codes", ""]
    lines += ["Every problem that a command names has a code. `ckptools explain CK101` prints its page.", ""]
    for subject, about in grouped(explanations(), lambda page: page.subject).items():
        lines += [f"## {subject.capitalize()}", "", "| code | meaning | usually |", "|---|---|---|"]
        lines += [f"| [{p.code}]({p.code}.md) | {p.meaning} | {_severity(p)} |" for p in about] + [""]
    yield "problems/index.md", "\n".join(lines)


def _severity(page: Explanation) -> str:
    return f'<span class="{page.severity}">{page.severity}</span>'


def _problem_page(page: Explanation, section: str) -> str:
    body = section.replace(f"## {page.code}", f"# {page.code}", 1).replace("\n###", "\n##")
    short = f"\n\nIn short: {page.remedy}.\n" if page.remedy else "\n"
    body = body.replace("\n## What to do\n", f"\n## What to do\n{short}", 1)
    body = body.replace("\n\n", f"\n\n*{effect_of(page)}*\n\n", 1)
    body = re.sub(rf"(?<!# )\b(CK\d{{3}})\b(?<!{page.code})(?![^`\n]*`\n)", r"[\1](\1.md)", body)
    return body + f"\n`ckptools explain {page.code}` prints this page. [All codes](index.md)\n"


def _project_pages() -> Iterator[tuple[str, str]]:
    for name in PROJECT:
        text = (ROOT / name).read_text("utf-8").replace("](docs/", "](../")
        yield f"project/{name}", re.sub(r"\[(`?changes/`?)\]\([^)]*\)", r"\1", text)


def _help_of(command: str) -> str:
    os.environ["COLUMNS"] = "80"
    return CliRunner().invoke(app, [command, "--help-all"], prog_name="ckptools").stdout.strip()
