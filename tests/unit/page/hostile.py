"""Markdown that would do harm on a page that showed it as it is."""

from __future__ import annotations

HOSTILE = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<a href='x' onclick=alert(1)>",
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt:alert(1))",
    "[x](java\tscript:alert(1))",
    "[x](&#106;avascript:alert(1))",
    "[x](vbscript:x) [y](file:///etc/passwd) [z](data:text/html;base64,xx)",
    "![x](javascript:alert(1))",
    "![t](http://tracker.example/x.png)",
    "![t](//tracker.example/x.png 'title\" onload=\"alert(1)')",
    "![t](data:image/svg+xml;base64,PHN2Zz4=)",
    '[x](http://a "on\\" onmouseover=alert(1) x=\\"")',
    '<http://a.example/"onmouseover=alert(1)>',
    "[r]: javascript:alert(1)\n\n[r]",
    '```"><script>alert(1)</script>\nx\n```',
    "```html\n<script>alert(1)</script>\n```",
    "$\\href{javascript:alert(1)}{x}$",
    "$\\text{<script>alert(1)</script>}$",
    "$\\style{background:url(http://tracker.example)}{x}$",
    "$$\n\\class{x}{y} \\unicode{60}script\\unicode{62}\n$$",
    "<style>@import 'http://tracker.example'</style>",
    "<iframe src=http://tracker.example></iframe><svg onload=alert(1)>",
    "<!-- --><base href=http://tracker.example>",
    "|a|\n|-|\n|<script><br onload=alert(1)>|",
    "<sub onclick=alert(1)>x</sub><sup></sub><br/onload=alert(1)>",
    'https://a.example/"onmouseover=alert(1) javascript://x vbscript://x data://x',
    "- [x] <script>\n- [ ] [x](javascript:alert(1))",
    "\\begin{align}\n\\href{javascript:alert(1)}{x} <script>\n\\end{align}",
)
"""Scripts, requests, styles and links that run something, each in another disguise."""
