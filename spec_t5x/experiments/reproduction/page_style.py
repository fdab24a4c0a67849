"""How the HTML report looks."""

from spec_t5x.experiments.reproduction.sections import Origin

# Beside the text, so that origins are not told apart by colour alone.
SYMBOLS = {
    Origin.CLOSED_FORM: "ƒ",
    Origin.MEASURED: "●",
    Origin.COMPILED: "▦",
    Origin.PAPER: "¶",
}

CSS = """
:root {
  color-scheme: light;
  --ink: #1f2328; --soft: #57606a; --line: #d0d7de; --link: #0550ae;
  --closed_form: #e8f1fb; --closed_form-ink: #0a4a8a;
  --measured: #e6f4ea; --measured-ink: #14622f;
  --compiled: #f0eafa; --compiled-ink: #55308d;
  --paper: #f8f0dc; --paper-ink: #6d4c00;
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 76rem; padding: 2.5rem 2rem 5rem; color: var(--ink);
  background: #fff; font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans",
    "Liberation Sans", Arial, sans-serif;
}
h1 { font-size: 2.1rem; line-height: 1.2; margin: 0 0 .4rem; letter-spacing: -.01em; }
h2 { font-size: 1.35rem; line-height: 1.3; margin: 0 0 .8rem; }
header h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; }
p { margin: 0 0 1rem; max-width: 48rem; }
a { color: var(--link); }
code {
  font: .88em ui-monospace, "SFMono-Regular", "DejaVu Sans Mono", Consolas, monospace;
  background: #f3f4f6; padding: .1em .35em; border-radius: 3px;
}
.lead { color: var(--soft); font-size: 1.05rem; }
.facts { display: grid; grid-template-columns: 1fr 1fr; gap: .2rem 2rem; margin: 1.5rem 0 0; }
.facts div, .legend div { display: flex; gap: .8rem; }
.facts dt { flex: 0 0 5.5rem; color: var(--soft); }
.facts dd, .legend dd { margin: 0; overflow-wrap: anywhere; }
.legend { margin: 0; }
.legend div { margin-bottom: .35rem; }
.legend dt { flex: 0 0 12.5rem; }
.badge {
  display: inline-block; padding: .05rem .5rem; border-radius: 1rem; font-size: .8rem;
  font-weight: 600; white-space: nowrap; border: 1px solid currentColor;
}
.badge.closed_form { background: var(--closed_form); color: var(--closed_form-ink); }
.badge.measured { background: var(--measured); color: var(--measured-ink); }
.badge.compiled { background: var(--compiled); color: var(--compiled-ink); }
.badge.paper { background: var(--paper); color: var(--paper-ink); }
.contents { list-style: none; margin: 0; padding: 0; border-top: 1px solid var(--line); }
.contents li {
  display: grid; grid-template-columns: 1fr auto; gap: 0 1rem; padding: .5rem 0;
  border-bottom: 1px solid var(--line);
}
.contents a { font-weight: 600; text-decoration: none; }
.contents a:hover { text-decoration: underline; }
.contents p { grid-column: 1; margin: 0; font-size: .93rem; color: var(--soft); }
.state { font-size: .87rem; white-space: nowrap; color: var(--measured-ink); }
.in-part .state { color: var(--paper-ink); }
.not-computed .state { color: #a1260d; }
section { margin-top: 3rem; padding-top: 2rem; border-top: 3px solid var(--ink); }
.gap {
  border-left: 4px solid #a1260d; background: #fdf0ed; padding: .6rem .9rem; max-width: none;
  overflow-wrap: anywhere;
}
.scroll { overflow-x: auto; margin: 1.4rem 0 .6rem; }
table { border-collapse: collapse; font-size: .93rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: .6rem; }
th, td { padding: .28rem .8rem; text-align: left; vertical-align: baseline; }
tbody th { font-weight: 400; white-space: nowrap; }
thead th { font-weight: 600; vertical-align: bottom; }
thead tr:first-child th { text-align: center; padding: .35rem .5rem; }
thead tr:last-child > * { border-bottom: 1.5px solid var(--ink); }
tbody tr:last-child > * { border-bottom: 1.5px solid var(--ink); }
tbody tr.block > * { border-top: 1px solid var(--line); }
tbody tr:hover > * { box-shadow: inset 0 0 0 100rem rgba(0, 0, 0, .045); }
.number { text-align: right; }
td.number { white-space: nowrap; }
table .closed_form:not(.badge) { background: var(--closed_form); }
table .measured:not(.badge) { background: var(--measured); }
table .compiled:not(.badge) { background: var(--compiled); }
table .paper:not(.badge) { background: var(--paper); }
.note, .source { font-size: .87rem; color: var(--soft); margin-bottom: .4rem; }
.source { overflow-wrap: anywhere; }
figure { margin: 1.6rem 0 .6rem; }
figure img { display: block; max-width: 100%; height: auto; }
figcaption { font-size: .93rem; color: var(--soft); margin-top: .5rem; }
.beside { display: flex; flex-wrap: wrap; gap: .5rem; align-items: baseline; margin-top: .3rem; }
sup { line-height: 0; font-size: .72em; }
@media (max-width: 45rem) {
  body { padding: 1.2rem 1rem 3rem; }
  .facts { grid-template-columns: 1fr; }
  .legend div { flex-direction: column; gap: 0; }
}
@media print { section { break-before: page; } body { max-width: none; } }
"""
