// The same question at another training step.

import { html, useEffect, useState } from "/static/vendor/vendor.js";
import { Loading, Notice, ask, num, plural } from "/static/base.js";
import { Share } from "/static/sidebar.js";

/** A list of the other steps (and trees) at which the question was rolled out. */
export function SameQuestion({ place, go, onClose }) {
  const [state, setState] = useState({ trees: [], busy: true, error: "" });
  useEffect(() => {
    const stop = new AbortController();
    gather(place, setState, stop.signal);
    return () => stop.abort();
  }, [place.run, place.step, place.tree]);
  const others = state.trees.filter((tree) => tree.step !== place.step || tree.index !== place.tree);
  const choose = (tree) => {
    go({ vstep: tree.step, vtree: tree.index, side: undefined });
    onClose();
  };
  return html`<div class="popover" role="dialog" aria-label="The same question elsewhere">
    <div class="row"><h3>The same question elsewhere</h3><span class="push"></span><button class="icon" aria-label="Close" onClick=${onClose}>×</button></div>
    ${state.error && html`<${Notice} kind="error" title="Not found">${state.error}</${Notice}>`}
    <ul class="list">${others.map((tree) => html`<li key=${`${tree.step}/${tree.index}`}><button onClick=${() => choose(tree)}>
      <span class="row small"><b>step ${tree.step}</b><span class="soft">tree ${tree.index}</span><${Share} tree=${tree} /><b class="figure">${num(tree.mean)}</b>
        <span class="soft push">${plural(tree.leaves, "leaf", "leaves")}</span></span></button></li>`)}</ul>
    ${state.busy ? html`<${Loading} what="Looking through the steps" />`
      : !others.length && html`<${Notice} title="Only here">No other stored step of this run asks this question.</${Notice}>`}
  </div>`;
}

async function gather(place, setState, signal) {
  let trees = [];
  let before;
  try {
    do {
      const found = await ask("same", { run: place.run, step: place.step, index: place.tree, before }, { signal });
      trees = [...trees, ...found.trees];
      before = found.next;
      setState({ trees, busy: before !== null, error: "" });
    } while (before !== null);
  } catch (error) {
    if (error.name !== "AbortError") setState({ trees, busy: false, error: error.message });
  }
}
