"""How the page is drawn: one style sheet, for light and dark, wide and narrow, screen and paper."""

STYLE = """
:root { --ink: #1b1b1b; --soft: #5c5c5c; --line: #dcdcda; --back: #ffffff; --fold: #f5f5f3 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e3; --soft: #a9a9a5; --line: #3a3d40; --back: #16181a; --fold: #212427 }
}
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back);
       margin: 0 auto; max-width: 1320px; padding: 0 1em; display: flex; gap: 2.5em;
       overflow-wrap: break-word }
main { flex: 1; min-width: 0; padding-bottom: 3em }
a { color: inherit }
h1 { margin: .8em 0 .2em; line-height: 1.2 }
h2 { margin: 0 0 .6em; line-height: 1.3; overflow-wrap: anywhere }
section { margin-top: 2.4em; border-top: 1px solid var(--line); padding-top: 1.2em }
nav.side { flex: 0 0 14em; position: sticky; top: 0; align-self: flex-start; max-height: 100vh;
           overflow-y: auto; padding: 1.6em 0; font-size: 14px }
nav a { display: block; padding: .25em 0; text-decoration: none; overflow-wrap: anywhere }
nav a:hover { text-decoration: underline }
details.contents { display: none }
summary { cursor: pointer }
section > details { margin: .5em 0 }
section > details > summary { color: var(--soft) }
.wide { overflow-x: auto }
table { border-collapse: collapse; margin: .6em 0; font-size: 14px; width: 100% }
th, td { text-align: left; padding: .3em .8em .3em 0; border-bottom: 1px solid var(--line);
         vertical-align: top }
td.number { font-variant-numeric: tabular-nums }
pre { background: var(--fold); padding: .7em 1em; white-space: pre-wrap; overflow-wrap: anywhere;
      font-size: 13px }
figure { margin: 0 0 1em } figcaption { color: var(--soft); font-size: 13.5px; margin-top: .3em }
figure img { max-width: 100%; display: block; background: #fff; border-radius: 4px }
.small { color: var(--soft); font-size: 13px }
@media (max-width: 1000px) {
  body { display: block } nav.side { display: none }
  details.contents { display: block; margin: 1em 0 }
}
@media (max-width: 700px) {
  .wide { border-right: 3px double var(--line) } .wide > * { min-width: 620px }
  .wide::before { content: "↔ wider than the screen: scroll sideways"; position: sticky; left: 0;
                  color: var(--soft); font-size: 12px }
}
@media print {
  :root { --ink: #000; --soft: #444; --line: #bbb; --back: #fff; --fold: #fff }
  * { print-color-adjust: exact }
  nav.side, details.contents { display: none } body { display: block; max-width: none }
  details::details-content { content-visibility: visible; block-size: auto }
  figure, tr { break-inside: avoid } h2 { break-after: avoid }
}
"""
