// The sampled tokens of a turn, coloured by one of their numbers.

import { html, useMemo, useRef, useState } from "/static/vendor/vendor.js";
import { Loading, Notice, num, plural, useAsk, useStored } from "/static/base.js";
import { TOKEN_COLOURS, tokenScale } from "/static/colour.js";

export function TokensTab({ place, node }) {
  const asked = node.parent === null ? null : { run: place.run, step: place.step, index: place.tree, node: node.id };
  const { data, error } = useAsk("tokens", asked);
  if (node.parent === null) return html`<${Notice} title="The prompt was not sampled">${plural(node.context, "token")}, without log-probs.</${Notice}>`;
  if (error) return html`<${Notice} kind="error" title="No tokens">${error}</${Notice}>`;
  if (!data) return html`<${Loading} what="Reading tokens" />`;
  return html`<${Tokens} data=${data} turn=${node.advantage} />`;
}

/** `turn`: the advantage of the whole turn, for rules that credit turns. */
export function Tokens({ data, turn = null }) {
  const columns = useMemo(() => withTurn(data, turn), [data, turn]);
  const [wanted, setWanted] = useStored("tokens", "logprob");
  const [at, setAt] = useState(null);
  const strip = useRef(null);
  const pieces = useMemo(() => toPieces(data, columns), [data, columns]);
  if (!pieces.length) return html`<${Notice} title="No sampled tokens">The turn failed before its first one, or came from elsewhere.</${Notice}>`;
  const has = (name) => columns[name].some((value) => value !== null);
  const shown = has(wanted) ? wanted : Object.keys(TOKEN_COLOURS).find(has) ?? "logprob";
  const scale = tokenScale(shown, columns[shown]);
  const move = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -pieces.length, End: pieces.length }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    setAt(Math.min(pieces.length - 1, Math.max(0, (at ?? -1) + step)));
  };
  const point = (event) => {
    const found = event.target.closest?.("[data-at]");
    if (found) setAt(Number(found.dataset.at));
  };
  return html`<div class="tokens">
    <div class="segments" role="radiogroup" aria-label="Colour tokens by">${Object.entries(TOKEN_COLOURS).map(([name, { name: text, about }]) => html`
      <button role="radio" aria-checked=${name === shown} disabled=${!has(name)} onClick=${() => setWanted(name)}
        title=${has(name) ? about : `${text}: not stored for this turn`}>${text}</button>`)}</div>
    <p class="legend small"><span>${num(scale.reversed ? scale.high : scale.low)}</span>
      <span class="ramp">${(scale.signed ? ["n4", "n3", "n2", "n1", "z", "p1", "p2", "p3", "p4"] : ["s0", "s1", "s2", "s3", "s4", "s5", "s6"])
        .map((name) => html`<i class=${name}></i>`)}</span><span>${num(scale.reversed ? scale.low : scale.high)}</span>
      <span class="soft">${TOKEN_COLOURS[shown].about}</span></p>
    ${data.pieces === null && html`<p class="soft small">No tokenizer is at hand, so tokens are shown as their ids.</p>`}
    <div class="strip" ref=${strip} tabindex="0" role="listbox" aria-label="Sampled tokens; arrow keys read them" dir="auto"
      onKeyDown=${move} onPointerOver=${point} onClick=${point}>${pieces.map((piece, i) => html`<span data-at=${i} role="option"
        aria-selected=${i === at} class=${`tok ${scale.of(piece[shown])} ${i === at ? "at" : ""} ${data.pieces === null ? "id" : ""}`}>${piece.text}</span>`)}</div>
    <${Reading} piece=${at === null ? null : pieces[at]} at=${at} total=${pieces.length} />
  </div>`;
}

function Reading({ piece, at, total }) {
  if (!piece) return html`<p class="reading soft small">${plural(total, "token")}. Point at one, or use the arrow keys.</p>`;
  const chance = piece.logprob === null ? null : Math.exp(piece.logprob);
  return html`<dl class="reading pairs small">
    <dt>token ${at + 1}</dt><dd><code>${JSON.stringify(piece.text)}</code> <span class="soft">id ${piece.ids.join(" ")}</span></dd>
    <dt>log-prob</dt><dd>${num(piece.logprob, { digits: 4 })}${chance === null ? "" : html` <span class="soft">p = ${chance < 0.0001 ? chance.toExponential(1) : chance.toFixed(4)}</span>`}</dd>
    <dt>entropy</dt><dd>${num(piece.entropy, { digits: 4 })}</dd>
    <dt>value</dt><dd>${num(piece.value, { digits: 4 })}</dd>
    <dt>advantage</dt><dd>${num(piece.advantage, { digits: 4, plus: true })}</dd></dl>`;
}

/** Columns of one length; where only turns have advantages, each token shows its turn's. */
function withTurn(data, turn) {
  const size = data.ids.length;
  const full = (values) => (values.length === size ? values : new Array(size).fill(null));
  const columns = Object.fromEntries(Object.entries(data.columns).map(([name, values]) => [name, full(values)]));
  if (!data.columns.advantage.length && turn !== null && turn !== undefined) columns.advantage = new Array(size).fill(turn);
  return columns;
}

/** Tokens that make one character come as one piece: its numbers are sums of log-probs and means of the rest. */
function toPieces(data, columns) {
  const parts = data.pieces ?? data.ids.map((id) => [1, String(id)]);
  const out = [];
  let start = 0;
  for (const [size, text] of parts) {
    const end = start + size;
    const values = Object.fromEntries(Object.entries(columns).map(([name, column]) => {
      const known = column.slice(start, end).filter((value) => value !== null);
      const sum = known.reduce((a, b) => a + b, 0);
      return [name, known.length < size ? null : name === "logprob" ? sum : sum / size];
    }));
    out.push({ text, ids: data.ids.slice(start, end), ...values });
    start = end;
  }
  return out;
}
