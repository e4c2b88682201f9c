"""A document of HTML that stands alone: one file without network or script, which a program can read again.

Everything in it is ASCII, other characters as references, so that no server, mail or editor can take it for another
encoding. The answers that it shows lie in it as JSON, in elements that no browser runs; and a policy in its head
forbids all that could run or load, should a name from a file ever get through.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptools.views.html.page import safe

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""What a browser lets the document do: be styled by itself."""

STYLE = """
:root{color-scheme:light dark}
body{margin:24px auto;padding:0 20px;max-width:1100px;font-family:system-ui,sans-serif;font-size:14px;line-height:1.5}
h1{font-size:20px;margin:0 0 2px;overflow-wrap:anywhere}
body .ckpt{font-size:13px}
body .ckpt h2,body .ckpt>details>summary{font:600 15px/1.5 system-ui,sans-serif;margin:18px 0 4px}
body .ckpt .ckpt-picture{margin:0 0 18px}
body .ckpt>.dim:last-child{margin-top:24px}
body .ckpt .verdict{font-family:system-ui,sans-serif;font-size:17px;margin:10px 0 4px;overflow-wrap:anywhere}
body .ckpt svg{max-width:100%;height:auto}
@media print{
@page{margin:12mm}
body{margin:0;padding:0;max-width:none;font-size:9pt}
body .ckpt{font-size:7pt}
body .ckpt h2,body .ckpt summary{break-after:avoid}
body .ckpt tr,body .ckpt svg{break-inside:avoid}
body .ckpt .wide,body .ckpt pre{overflow:visible}
body .ckpt table{margin-left:0}
body .ckpt td,body .ckpt th{padding-right:7px}
body .ckpt .w{min-width:12ch}
body .ckpt pre{white-space:pre-wrap;margin-left:0}
details::details-content{content-visibility:visible;block-size:auto}
}
"""
"""How the document looks. The style of its tables stands behind this, and gives way to `body .ckpt`; on paper folds are
open, and what is wide goes on in the next line."""


def document(title: str, head: str, page: str, answers: Mapping[str, str]) -> str:
    """A whole document.

    Args:
        title: what it is about, as text.
        head: its heading, as text.
        page: what it shows, as HTML.
        answers: JSON objects by the name of the command that prints them; each is in an element of that id.
    """
    data = "".join(
        f'<script type="application/json" id="{name}">\n{_quoted(json)}\n</script>\n' for name, json in answers.items()
    )
    html = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{safe(title, 200)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{safe(head)}</h1>\n{page}\n{data}</body>\n</html>\n"
    )
    return html.encode("ascii", "xmlcharrefreplace").decode("ascii")


def _quoted(json: str) -> str:
    """JSON that ends no element and opens no comment: `<` is in none but its strings, which may have it escaped."""
    return json.replace("<", "\\u003c")
