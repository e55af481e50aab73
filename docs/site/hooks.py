"""The site's navigation, from the table of docs/index.md, and links to what only a repository shows."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

INDEX = "docs/index.md"
UNSEARCHED = ("CHANGELOG.md", "benchmarks/results/LOG.md")
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s:]+)(#[^)\s]*)?\)")  # not of a picture, not of an address


def on_config(config: Any) -> Any:
    """The pages in the order of the table; a page that the table lacks follows under "More"."""
    pages = Path(config.docs_dir)
    table = (pages / INDEX).read_text(encoding="utf-8")
    listed = {posixpath.normpath(posixpath.join("docs", target)): title for title, target, _ in _LINK.findall(table)}
    titles = {"README.md": "Start", INDEX: "All pages"}
    titles |= {target: title for target, title in listed.items() if target not in titles and target.endswith(".md")}
    found = [*sorted(pages.glob("docs/*.md")), *sorted(pages.glob("*.md"))]
    more = [path.relative_to(pages).as_posix() for path in found if path.relative_to(pages).as_posix() not in titles]
    config.nav = [{title: target} for target, title in titles.items()] + ([{"More": more}] if more else [])
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """A link to a folder of the repository becomes its name: a site has no page for it. The search leaves the history
    out, which mentions everything."""
    if page.file.src_uri in UNSEARCHED:
        page.meta["search"] = {"exclude": True}
    here = posixpath.dirname(page.file.src_uri)

    def plain(link: re.Match[str]) -> str:
        target = Path(config.docs_dir, posixpath.normpath(posixpath.join(here, link[2])))
        return link[1] if target.is_dir() else link[0]

    return _LINK.sub(plain, markdown)
