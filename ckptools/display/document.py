"""A page of HTML as a file of its own.

A document stands alone: one file without network, and without script unless one is given, which a program can read
again. All of it is ASCII, other characters as references, so that no server, mail or editor can take it for another
encoding. The answers that it shows lie in it as JSON, in elements that no browser runs, and a policy in its head
forbids all that could run or load, should a name from a file ever get through.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping

from ckptools.display.page import safe

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""The policy that lets the document use its own style and nothing else."""


DOCUMENT_STYLE = """
:root{color-scheme:light dark;--card:#f6f8fa;--line:#dfe3e8;--badbg:#fdecea;--warnbg:#fdf3e0;--goodbg:#e8f5ec}
@media(prefers-color-scheme:dark){
:root{--card:#1a1d20;--line:#2b3036;--badbg:#3a1614;--warnbg:#33270f;--goodbg:#10301c}}
*{box-sizing:border-box}
body{margin:0 auto;padding:0 24px 48px;max-width:1240px;font:14px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:20px;margin:20px 0 2px}
h1 small{font-weight:400;font-size:15px;opacity:.7}
body .ckpt{font:inherit}
body .ckpt h2,body .ckpt h3{display:inline;font-size:16px;margin:0;line-height:2}
body .ckpt section>h2{display:block}
body .ckpt h3{font-size:14px;font-weight:600}
body .ckpt section,body .ckpt>details{margin-top:18px}
body .ckpt.ckpt.ckpt td{white-space:pre-wrap}
body .ckpt.ckpt.ckpt .n,body .ckpt.ckpt.ckpt .k{font:12.5px/1.6 ui-monospace,monospace}
body .ckpt.ckpt.ckpt .n{white-space:pre}
body .ckpt.ckpt.ckpt pre,body .ckpt code{font:12.5px/1.5 ui-monospace,monospace}
body .ckpt .band{border-left:6px solid var(--ckpt-rule);border-radius:6px;padding:12px 18px;margin:12px 0;
background:var(--card)}
body .ckpt .band b{display:block;font-size:18px}
body .ckpt .band.is-bad{background:var(--badbg);border-color:var(--ckpt-bad)}
body .ckpt .band.is-warn{background:var(--warnbg);border-color:var(--ckpt-warn)}
body .ckpt .band.is-good{background:var(--goodbg);border-color:var(--ckpt-good)}
body .ckpt .tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px}
body .ckpt .tile{background:var(--card);border:1px solid var(--line);border-radius:6px;padding:8px 12px}
body .ckpt .tile span,body .ckpt .tile i{display:block;font-size:12px;font-style:normal;color:var(--ckpt-dim)}
body .ckpt .tile b{font-size:18px;font-weight:600}
body .ckpt nav{margin:14px 0 0}
body .ckpt nav a{margin-right:14px}
body .ckpt a{color:inherit}
body .ckpt .two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:0 28px}
body .ckpt .cause{border:1px solid var(--line);border-radius:6px;padding:8px 14px;margin:8px 0}
body .ckpt .cause>a{font:600 12px ui-monospace,monospace;margin-right:8px}
body .ckpt .cause .do{margin-top:2px}
body .ckpt .code{margin:10px 0 16px;max-width:100ch}
body .ckpt .code .step{padding-left:4ch;text-indent:-2ch}
body .ckpt .ckpt-picture{margin:0 0 12px}
body .ckpt svg{max-width:100%;height:auto}
@media(max-width:640px){
body{padding:0 12px 32px}
body .ckpt.ckpt.ckpt table,body .ckpt.ckpt.ckpt tbody,body .ckpt.ckpt.ckpt tr,body .ckpt.ckpt.ckpt td{display:block;
margin-left:0;width:auto;min-width:0;text-align:left;white-space:pre-wrap}
body .ckpt.ckpt.ckpt thead{position:absolute;clip-path:inset(50%);height:1px;width:1px;overflow:hidden}
body .ckpt.ckpt.ckpt tbody tr{border:1px solid var(--line);border-radius:6px;padding:6px 10px;margin:6px 0}
body .ckpt.ckpt.ckpt .n{text-align:left;white-space:normal}
body .ckpt.ckpt.ckpt td:empty{display:none}
body .ckpt.ckpt.ckpt td[data-t]::before{content:attr(data-t) " ";color:var(--ckpt-dim);font:12px system-ui,sans-serif}
}
@media print{
@page{margin:12mm}
body{margin:0;padding:0;max-width:none;font-size:9pt}
body .ckpt h2,body .ckpt summary{break-after:avoid}
body .ckpt tr,body .ckpt svg,body .ckpt .cause:not(:has(details)),body .ckpt .tile{break-inside:avoid}
body .ckpt .wide,body .ckpt pre{overflow:visible}
body .ckpt.ckpt.ckpt table{margin-left:0;font-size:7pt}
body .ckpt.ckpt.ckpt thead{display:table-header-group}
body .ckpt.ckpt.ckpt td,body .ckpt.ckpt.ckpt th{padding-right:7px}
body .ckpt.ckpt.ckpt .n,body .ckpt.ckpt.ckpt .k{font-size:7pt}
body .ckpt.ckpt.ckpt .w{min-width:12ch}
body .ckpt.ckpt.ckpt pre{white-space:pre-wrap;margin-left:0;font-size:7pt}
body .ckpt nav{display:none}
body .ckpt .band,body .ckpt .tile{print-color-adjust:exact}
summary{list-style:none}
summary::-webkit-details-marker{display:none}
details::details-content{content-visibility:visible;block-size:auto}
}
"""
"""How the document looks: prose in a proportional face, names and numbers in a monospaced one; below 640 pixels the
rows of tables are cards. On paper folds are open, heads of tables are repeated, and what is wide goes on below."""


SCRIPT_STYLE = """
.ckpt th[tabindex]{cursor:pointer}
.ckpt th[aria-sort=ascending]::after{content:" \\25b2"}
.ckpt th[aria-sort=descending]::after{content:" \\25bc"}
.ckpt .find{display:block;margin:4px 0 2px 16px;font:inherit}
.ckpt tr.lit,.ckpt .cause.lit{outline:2px solid}
.ckpt rect.lit{stroke:currentColor;stroke-width:3}
@media print{.ckpt .find{display:none}}
"""
"""How a document with a script looks beside that."""


def document(title: str, head: str, page: str, answers: Mapping[str, str], beside: str = "", script: str = "") -> str:
    """A whole document: its title and heading as text, what stands beside the heading, what it shows as HTML.

    `answers` has JSON objects by the name of the command that prints them; each is in an element of that id. The policy
    lets one `script` run, ASCII and our own, by its SHA-256, and no other.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"{POLICY}; script-src 'sha256-{digest}'" if script else POLICY
    style, runs = (DOCUMENT_STYLE + SCRIPT_STYLE, f"<script>{script}</script>\n") if script else (DOCUMENT_STYLE, "")
    beside = f' <small class="dim">{safe(beside)}</small>' if beside else ""
    data = "".join(
        f'<script type="application/json" id="{name}">\n{_quoted(json)}\n</script>\n' for name, json in answers.items()
    )
    html = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{safe(title, 200)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"<h1>{safe(head)}{beside}</h1>\n{page}\n{data}{runs}</body>\n</html>\n"
    )
    return html.encode("ascii", "xmlcharrefreplace").decode("ascii")


def _quoted(json: str) -> str:
    """JSON that ends no element and opens no comment: `<` is in none but its strings, which may have it escaped."""
    return json.replace("<", "\\u003c")
