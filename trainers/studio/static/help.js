// The keys.

import { html, useEffect, useRef } from "/static/vendor/vendor.js";

const KEYS = [
  ["Nodes", [["← → ↑ ↓", "go through the tree"], ["Space", "collapse or expand a branch"], ["1 – 5", "turn, tokens, siblings, credit, fork"], ["w", "wider or narrower"], ["Esc", "close"]]],
  ["Picture", [["f", "fit the whole tree"], ["+ −", "zoom"], ["c  e", "collapse all, expand all"], ["s", "the same question at another step"]]],
  ["Run", [["[  ]", "previous, next step"], ["j  k", "next, previous tree of the list"], ["/", "search in all text"]]],
  ["Page", [["t", "light, dark, as the system"], ["?", "this help"]]],
];

export function Help({ onClose }) {
  const box = useRef(null);
  useEffect(() => box.current?.focus(), []);
  return html`<div class="veil" onClick=${(event) => event.target === event.currentTarget && onClose()}>
    <div class="dialog help" role="dialog" aria-modal="true" aria-label="Keyboard" tabindex="-1" ref=${box}>
      <div class="row"><h2>Keyboard</h2><span class="push"></span><button class="icon" aria-label="Close" onClick=${onClose}>×</button></div>
      <div class="keys">${KEYS.map(([name, rows]) => html`<section><h3>${name}</h3><dl>${rows.map(([key, text]) => html`<dt><kbd>${key}</kbd></dt><dd>${text}</dd>`)}</dl></section>`)}</div>
    </div></div>`;
}
