// Fork here: resume the environment at a node, write a turn or let the model write one, see what comes back.

import { html, useEffect, useRef, useState } from "/static/vendor/vendor.js";
import { Loading, Notice, Verdict, ask, kindName, num, plural, useAsk } from "/static/base.js";
import { Block, Pairs, Retrieved } from "/static/inspector.js";
import { Tokens } from "/static/tokens.js";

const TAGS = ["search", "answer", "python"];

export function ForkTab({ place, node, enabled }) {
  if (!enabled) return html`<${Notice} title="Forking is off">This studio was started with <code>--no-fork</code>.</${Notice}>`;
  if (node.status !== "open") {
    return html`<${Notice} title="The episode ended here">A fork needs a node that can go on: choose the parent, and write another turn than this one.</${Notice}>`;
  }
  return html`<${Session} place=${place} node=${node} />`;
}

function Session({ place, node }) {
  const [played, setPlayed] = useState([]);
  const [text, setText] = useState("");
  const [sampled, setSampled] = useState(null);
  const [busy, setBusy] = useState("");
  const [error, setError] = useState("");
  const [temperature, setTemperature] = useState(1);
  const [seed, setSeed] = useState(0);
  const box = useRef(null);
  const about = useAsk("fork", { run: place.run });
  const [standing, setStanding] = useState(null);
  const at = { run: place.run, step: place.step, index: place.tree, node: node.id };
  const turns = played.map((answer) => answer.text);
  const ended = played.length > 0 && played.at(-1).status !== "open";

  const attempt = async (what, work) => {
    setBusy(what);
    setError("");
    try {
      await work();
    } catch (problem) {
      setError(problem.message);
    }
    setBusy("");
  };
  const resume = () => attempt("Playing the path again", async () => setStanding(await ask("fork/resume", {}, { body: at })));
  useEffect(() => { resume(); }, []);
  const play = () => attempt("The environment answers", async () => {
    const answer = await ask("fork/play", {}, { body: { ...at, turns, text } });
    setPlayed([...played, answer]);
    setText("");
    setSampled(null);
  });
  const sample = () => attempt("The model writes", async () => {
    const turn = await ask("fork/sample", {}, { body: { ...at, turns, seed, temperature } });
    setText(turn.text);
    setSampled(turn);
    setSeed(seed + 1);
  });
  const back = () => {
    setText(played.at(-1).text);
    setPlayed(played.slice(0, -1));
  };
  const insert = (tag) => {
    const wrapped = `<${tag}>${text.replace(/<\/?(search|answer|python)>/g, "").trim()}</${tag}>`;
    setText(wrapped);
    box.current?.focus();
  };
  const onKey = (event) => {
    event.stopPropagation();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && text.trim() && !busy) play();
    if (event.key === "Escape") box.current?.blur();
  };
  if (!standing) {
    return error ? html`<${Notice} kind="error" title="This node cannot be resumed">${error}</${Notice}>` : html`<${Loading} what=${busy || "Resuming"} />`;
  }
  return html`<div class="fork">
    <p class="soft small">The environment stands after ${node.parent === null ? "the prompt" : html`turn <b class="figure">${node.id}</b>`},
      with ${standing.context} of ${plural(standing.limit, "token")} of context used. Nothing here changes the run.</p>
    ${standing.differs && html`<${Notice} kind="warning" title="The replay differs">At node ${standing.differs} the environment now says something else
      than it did in the rollout; corpus or tools may have changed. The fork goes on from what it says now.</${Notice}>`}
    ${played.map((answer, i) => html`<${Played} key=${i} answer=${answer} />`)}
    ${ended ? html`<${Notice} title="The episode ended">Reward ${num(played.at(-1).reward, { digits: 4 })}.</${Notice}>`
      : html`<div class="write">
        <div class="row"><h3>${played.length ? "Next turn" : "Another turn"}</h3><span class="push"></span>
          ${TAGS.filter((tag) => standing.stop.includes(`</${tag}>`)).map((tag) => html`<button class="chip" title=${`Wrap the text in <${tag}>`} onClick=${() => insert(tag)}>${tag}</button>`)}</div>
        <textarea ref=${box} rows="4" dir="auto" aria-label="Turn to play" placeholder=${node.children.length ? `For example: ${node.children[0].text}` : "What the model would write"} value=${text}
          onInput=${(event) => { setText(event.target.value); setSampled(null); }} onKeyDown=${onKey}></textarea>
        ${sampled && html`<details class="sampled"><summary>Written by ${sampled.model}, ${plural(sampled.ids.length, "token")}</summary><${Tokens} data=${sampled} /></details>`}
        <div class="row wrap"><button class="primary" disabled=${!text.trim() || Boolean(busy)} title="Ctrl+Enter" onClick=${play}>Play turn</button>
          <button disabled=${Boolean(busy) || !about.data?.model} onClick=${sample}
            title=${about.data?.model ? `${about.data.model_source}: ${about.data.model}` : "No model is at hand; start with --model DIR"}>Let the model write</button>
          <label class="tight">temperature <input type="number" min="0" max="2" step="0.1" value=${temperature} onInput=${(event) => setTemperature(Number(event.target.value))} /></label>
          <label class="tight">seed <input type="number" min="0" step="1" value=${seed} onInput=${(event) => setSeed(Math.max(0, Math.trunc(Number(event.target.value) || 0)))} /></label></div>
        ${about.data && !about.data.model && html`<p class="soft small">No model is at hand to write turns: the run has written none yet. Start with <code>--model DIR</code>.</p>`}
      </div>`}
    ${busy && html`<${Loading} what=${busy} />`}
    ${error && html`<${Notice} kind="error" title="Not played">${error}</${Notice}>`}
    ${played.length > 0 && html`<div class="row"><button onClick=${back} disabled=${Boolean(busy)}>Take back</button>
      <button onClick=${() => setPlayed([])} disabled=${Boolean(busy)}>Start over</button></div>`}
  </div>`;
}

function Played({ answer }) {
  const info = Object.entries(answer.info).filter(([, value]) => typeof value !== "object" || value === null)
    .map(([name, value]) => [name.replaceAll("_", " "), String(value)]);
  return html`<article class="played"><header class="row"><span class="kind">${kindName(answer.kind)}</span><${Verdict} node=${answer} /></header>
    <${Block} name="Turn" text=${answer.text} kind="action" /><${Retrieved} items=${answer.retrieved} />
    <${Block} name="Observation" text=${answer.observation} kind="observation" />
    <details><summary class="small soft">From the environment</summary><${Pairs} rows=${info} /></details></article>`;
}
