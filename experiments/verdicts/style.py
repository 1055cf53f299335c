"""How cards and statements are drawn on the page, beside `rank_collapse.report.style`."""

STYLE = """
:root { --holds: #00664b; --part: #7d6200; --fails: #a33b00; --open: #5f5f5f }
@media (prefers-color-scheme: dark) {
  :root { --holds: #4fc79f; --part: #e0b93c; --fails: #ff9156; --open: #aaaaaa }
}
section > details.statement > summary { color: inherit }
.source { color: var(--soft) }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(19em, 1fr)); gap: 1.6em;
         margin: 1.4em 0 }
.card { text-decoration: none } .card img { width: 100%; background: #fff; border-radius: 4px }
.card p { margin: .4em 0 } .card .small::before { content: "→ " }
.card:hover .small { text-decoration: underline }
.answer { font-weight: 600; white-space: nowrap }
.holds, .within { color: var(--holds) }
.partly-supported, .not-in-all-settings { color: var(--part) }
.does-not-hold, .outside, .failed { color: var(--fails) }
.inconclusive, .undecided, .not-tested, .must-hold, .finding { color: var(--open) }
.counts { display: flex; flex-wrap: wrap; gap: .2em 1.4em; font-size: 17px; margin: .8em 0 }
.statement { border-bottom: 1px solid var(--line) }
.statement > summary { display: grid; gap: .2em 1.2em; padding: .7em 0; align-items: start;
                       grid-template-columns: 9em minmax(0, 1fr) minmax(0, 1fr); list-style: none }
.statement > summary::-webkit-details-marker { display: none }
.statement > summary .answer::before { content: "▸ " }
.statement[open] > summary .answer::before { content: "▾ " }
.statement > summary:hover { background: var(--fold) }
.statement > div { background: var(--fold); padding: .4em 1em; margin-bottom: .8em }
.statement p { margin: .5em 0 }
@media (min-width: 800px) { .card.broad { grid-column: span 2 } }
@media (max-width: 700px) {
  .statement > summary { grid-template-columns: minmax(0, 1fr) }
  .statement > div { padding: .4em .6em }
}
@media print {
  :root { --holds: #00664b; --part: #7d6200; --fails: #a33b00; --open: #5f5f5f }
  .statement > summary { break-inside: avoid }
}
"""
