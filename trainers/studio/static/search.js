// Search in all text of a run.

import { html, useEffect, useLayoutEffect, useRef, useState } from "/static/vendor/vendor.js";
import { Loading, Notice, ask, plural } from "/static/base.js";

const DELAY = 180;
const ENOUGH = 100;

export function SearchBox({ run, go, onClose }) {
  const [query, setQuery] = useState("");
  const [state, setState] = useState({ hits: [], next: undefined, busy: false, error: "", steps: 0 });
  const [at, setAt] = useState(0);
  const input = useRef(null);
  const list = useRef(null);
  useLayoutEffect(() => input.current?.focus(), []); // at once: what is typed right after "/" is meant for it
  useEffect(() => {
    const stop = new AbortController();
    const wanted = query.trim();
    setAt(0);
    setState({ hits: [], next: undefined, busy: Boolean(wanted), error: "", steps: 0 });
    if (!wanted) return undefined;
    const timer = setTimeout(() => collect(run, wanted, undefined, { hits: [], steps: 0 }, setState, stop.signal), DELAY);
    return () => {
      clearTimeout(timer);
      stop.abort();
    };
  }, [query, run]);
  const open = (hit) => {
    if (!hit) return;
    go({ step: hit.step, tree: hit.index, node: hit.node, vstep: undefined, vtree: undefined, side: undefined, tab: undefined });
    onClose();
  };
  const onKey = (event) => {
    event.stopPropagation();
    if (event.key === "Escape") onClose();
    if (event.key === "Enter") open(state.hits[at]);
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step && state.hits.length) {
      event.preventDefault();
      const next = Math.min(state.hits.length - 1, Math.max(0, at + step));
      setAt(next);
      list.current?.children[next]?.scrollIntoView({ block: "nearest" });
    }
  };
  const more = () => collect(run, query.trim(), state.next, state, setState, new AbortController().signal);
  return html`<div class="veil" onClick=${(event) => event.target === event.currentTarget && onClose()}>
    <div class="dialog search" role="dialog" aria-modal="true" aria-label="Search" onKeyDown=${onKey}>
      <input ref=${input} type="search" placeholder="Search questions, turns and passages of this run" aria-label="Search text" value=${query}
        onInput=${(event) => setQuery(event.target.value)} />
      ${state.error && html`<${Notice} kind="error" title="The search ended">${state.error}</${Notice}>`}
      ${query.trim() && !state.busy && !state.hits.length && !state.error && html`<${Notice} title="Nothing found">No stored text of this run holds “${query.trim()}”.</${Notice}>`}
      <ul class="hits" ref=${list} role="listbox" aria-label="Places found">${state.hits.map((hit, i) => html`<li key=${i} role="option" aria-selected=${i === at}>
        <button tabindex="-1" onClick=${() => open(hit)} onPointerMove=${() => setAt(i)}><span class="row small soft"><span>step ${hit.step}</span><span>tree ${hit.index}</span>
          <span class="figure">${hit.node}</span><span>${hit.field}</span>${hit.more > 0 && html`<span class="push">and ${plural(hit.more, "more place")} in this tree</span>`}</span>
          <span class="snippet" dir="auto">${hit.before}<mark>${hit.match}</mark>${hit.after}</span></button></li>`)}</ul>
      <footer class="row small soft">${state.busy ? html`<${Loading} what=${`Searching, ${plural(state.steps, "step")} so far`} />`
        : query.trim() ? html`<span>${plural(state.hits.length, "place")}, newest step first</span>` : html`<span>↑ ↓ choose · Enter opens · Esc closes</span>`}
        <span class="push"></span>${!state.busy && state.next !== null && state.next !== undefined && html`<button class="link" onClick=${more}>older steps</button>`}</footer>
    </div></div>`;
}

/** Ask slice by slice until there is enough to look at. */
async function collect(run, query, before, had, setState, signal) {
  let { hits, steps } = had;
  let next = before;
  setState({ hits, steps, next, busy: true, error: "" });
  const goal = hits.length + ENOUGH;
  try {
    do {
      const found = await ask("search", { run, q: query, before: next }, { signal });
      hits = [...hits, ...found.hits];
      steps += found.steps;
      next = found.next;
      setState({ hits, steps, next, busy: next !== null && hits.length < goal, error: "" });
    } while (next !== null && hits.length < goal);
  } catch (error) {
    if (error.name !== "AbortError") setState({ hits, steps, next, busy: false, error: error.message });
  }
}
