// The page: what is asked for, the three columns, keyboard.

import { html, render, useEffect, useMemo, useRef, useState } from "/static/vendor/vendor.js";
import { Loading, Notice, count, num, plural, useAsk, useLatest, usePlace, useStored, useTicks } from "/static/base.js";
import { NODE_COLOURS, nodeScale } from "/static/colour.js";
import { SameQuestion } from "/static/compare.js";
import { download, fileName, toPng, toSvg } from "/static/exports.js";
import { Help } from "/static/help.js";
import { Inspector, TABS } from "/static/inspector.js";
import { autoDensity, indexTree } from "/static/layout.js";
import { Picture } from "/static/picture.js";
import { SearchBox } from "/static/search.js";
import { Share, Sidebar, mostTelling } from "/static/sidebar.js";

const POLL_MS = 2000;
const THEMES = ["auto", "light", "dark"];

function App() {
  const runs = useAsk("runs", {}, useTicks(15_000));
  if (runs.error) return html`<div class="whole"><${Notice} kind="error" title="The studio cannot start">${runs.error}</${Notice}></div>`;
  if (!runs.data) return html`<div class="whole"><${Loading} /></div>`;
  return html`<${Desk} known=${runs.data} />`;
}

function Desk({ known }) {
  const [asked, go] = usePlace();
  const there = asked.run === undefined || known.runs.some((item) => item.id === asked.run);
  const place = there ? asked : {};
  const run = place.run ?? known.runs[0].id;
  const polled = useAsk("steps", { run }, useTicks(POLL_MS));
  const steps = useMemo(() => polled.data?.steps ?? [], [polled.data]);
  const live = polled.data?.live ?? false;
  const last = steps.at(-1)?.step;
  const [follow, setFollow] = useStored("follow", false);
  const step = place.step ?? last;
  useEffect(() => {
    if (follow && last !== undefined && place.step !== undefined && place.step !== last) {
      go({ step: last, tree: undefined, node: undefined, vstep: undefined, vtree: undefined }, { replace: true });
    }
    // Whoever does not follow stays where the page opened, when newer steps come.
    if (!follow && last !== undefined && place.step === undefined) go({ step: last }, { replace: true });
  }, [follow, last, place.step]);
  const list = useAsk("trees", step === undefined ? null : { run, step }, stamp(steps, step));
  const trees = list.data?.trees;
  const index = place.tree ?? (trees ? mostTelling(trees)?.index : undefined);
  const at = { ...place, run, step, tree: index };

  const [panel, setPanel] = useState("");
  const [theme, setTheme] = useStored("theme", "auto");
  const [wide, setWide] = useState(false);
  const [aside, setAside] = useState(false);
  useEffect(() => { document.documentElement.dataset.theme = theme; }, [theme]);
  useEffect(() => { document.title = step === undefined ? "turntree studio" : `step ${step} · ${run} · turntree`; }, [run, step]);
  const tools = useRef(null);
  const keys = useLatest({ at, go, steps, trees, panel, setPanel, tools, theme, setTheme, setWide, wide, setFollow });
  useEffect(() => {
    const listen = (event) => shortcut(event, keys.current);
    addEventListener("keydown", listen);
    return () => removeEventListener("keydown", listen);
  }, []);
  useEffect(() => {
    if (panel !== "same" && panel !== "export") return undefined;
    const leave = (event) => event.target.closest?.(".anchor") || setPanel("");
    addEventListener("pointerdown", leave);
    return () => removeEventListener("pointerdown", leave);
  }, [panel]);
  return html`<div class=${`desk ${aside ? "aside-open" : ""}`}>
    <header class="bar"><button class="icon drawer" aria-label="Runs and trees" aria-expanded=${aside} onClick=${() => setAside(!aside)}>☰</button>
      <a class="brand" href="#/"><img src="/static/icon.svg" alt="" width="20" height="20" />turntree <span>studio</span></a><span class="push"></span>
      <button class="ask" onClick=${() => setPanel("search")}>Search all text <kbd>/</kbd></button>
      <button class="icon" title=${`Colours: ${theme}  t`} aria-label=${`Colour theme: ${theme}`} onClick=${() => setTheme(nextTheme(theme))}>${{ auto: "◐", light: "☀", dark: "☾" }[theme]}</button>
      <button class="icon" title="Keys  ?" aria-label="Keyboard help" onClick=${() => setPanel("help")}>?</button></header>
    ${useMemo(() => html`<${Sidebar} runs=${known.runs} unreadable=${known.unreadable} run=${run} steps=${steps} live=${live} step=${step} trees=${trees} failure=${list.error}
      index=${index} go=${(...change) => { setAside(false); go(...change); }} follow=${follow} setFollow=${setFollow} />`,
    [known, run, steps, live, step, trees, list.error, index, follow])}
    <main>${!there ? html`<${Notice} kind="error" title=${`There is no run ${asked.run} here`}>
        <button onClick=${() => go({ run, step: undefined, tree: undefined, node: undefined, vstep: undefined, vtree: undefined })}>Open ${run}</button></${Notice}>`
      : polled.error ? html`<${Notice} kind="error" title="This run cannot be read">${polled.error}</${Notice}>`
      : step === undefined ? (polled.data ? html`<${Waiting} live=${polled.data.live} />` : html`<${Loading} />`)
      : index === undefined ? (list.error ? html`<${Notice} kind="error" title="This step cannot be shown">${list.error}</${Notice}>`
        : list.data ? html`<${Notice} title="No trees in this step" />` : html`<${Loading} what="Reading trees" />`)
      : html`<${Stage} at=${at} go=${go} known=${known} tools=${tools} panel=${panel} setPanel=${setPanel} wide=${wide} setWide=${setWide} />`}</main>
    ${panel === "search" && html`<${SearchBox} run=${run} go=${go} onClose=${() => setPanel("")} />`}
    ${panel === "help" && html`<${Help} onClose=${() => setPanel("")} />`}
  </div>`;
}

const nextTheme = (theme) => THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];

/** Changes when a resumed run wrote the step again. */
const stamp = (steps, step) => JSON.stringify(steps.find((item) => item.step === step)?.trees ?? null);

function Waiting({ live }) {
  return html`<${Notice} title=${live ? "Waiting for the first step" : "This run holds no trees"}>${live
    ? "The page shows it as soon as it is written." : html`Train with <code>trainer.store_sample</code> above 0 to keep some.`}</${Notice}>`;
}

// The stage: one tree, or two -----------------------------------------------------------------------------------------

function Stage({ at, go, known, tools, panel, setPanel, wide, setWide }) {
  const [colour, setColour] = useStored("colour", "advantage");
  const [density, setDensity] = useStored("density", "auto");
  const two = at.vstep !== undefined && at.vtree !== undefined;
  const one = useAsk("tree", { run: at.run, step: at.step, index: at.tree });
  const other = useAsk("tree", two ? { run: at.run, step: at.vstep, index: at.vtree } : null);
  const side = two && at.side === "b" ? "b" : "a";
  const otherTools = useRef(null);
  const shown = side === "b" ? other.data : one.data;
  const byId = useMemo(() => (shown ? indexTree(shown.nodes) : null), [shown]);
  const node = byId && at.node ? byId.get(at.node) : null;
  const choose = (wanted) => (id) => go({ node: id, step: at.step, tree: at.tree, side: two && wanted === "b" ? "b" : undefined, run: at.run });
  if (one.error) return html`<${Notice} kind="error" title="This tree cannot be shown">${one.error}</${Notice}>`;
  if (!one.data) return html`<${Loading} what="Reading the tree" />`;
  const close = () => go({ node: undefined, side: undefined }, { replace: true });
  const picture = (data, name, ref) => html`<${Picture} tree=${data} node=${side === name ? at.node ?? "" : ""} colour=${colour} density=${density}
    onSelect=${choose(name)} tools=${ref} label=${`Tree of step ${data.step}${two ? ` ${name}` : ""}`} />`;
  return html`<div class="stage">
    <${Head} tree=${one.data} at=${at} />
    <${Toolbar} tree=${one.data} tools=${tools} colour=${colour} setColour=${setColour} density=${density} setDensity=${setDensity}
      at=${at} go=${go} panel=${panel} setPanel=${setPanel} two=${two} />
    ${at.node && byId && !node && html`<${Notice} kind="warning" title=${`There is no node ${at.node} in this tree`}>The link may be of another run.</${Notice}>`}
    <div class="work"><div class=${`pictures ${two ? "two" : ""}`}>
      <div class="half">${two && html`<${Side} tree=${one.data} />`}${picture(one.data, "a", tools)}</div>
      ${two && html`<div class="half"><${Side} tree=${other.data} step=${at.vstep} close=${() => go({ vstep: undefined, vtree: undefined, side: undefined })} />
        ${other.error ? html`<${Notice} kind="error" title="This tree cannot be shown">${other.error}</${Notice}>`
          : other.data ? picture(other.data, "b", otherTools) : html`<${Loading} what="Reading the tree" />`}</div>`}
    </div>${node && html`<${Inspector} place=${at} tree=${shown} node=${node} byId=${byId} rules=${known.rules} fork=${known.fork} go=${go}
      wide=${wide} setWide=${setWide} onClose=${close} />`}</div>
    <${Legend} tree=${one.data} colour=${colour} />
  </div>`;
}

function Head({ tree }) {
  const { summary, answers } = tree;
  return html`<header class="head"><h1 dir="auto">${summary.question || "(no text)"}</h1>
    <p class="row wrap small">${answers.length > 0 && html`<span class="soft">accepted</span>${answers.slice(0, 6).map((answer) => html`<span class="gold" dir="auto">${answer}</span>`)}
      ${answers.length > 6 && html`<span class="soft">and ${answers.length - 6} more</span>`}<i class="gap"></i>`}
      <span>mean reward <b class="figure">${num(summary.mean)}</b></span><${Share} tree=${summary} />
      <span>${plural(summary.leaves, "leaf", "leaves")}</span><span>${plural(summary.turns, "turn")}</span><span>depth ${summary.depth}</span>
      <span>${count(summary.tokens)} sampled tokens</span>${summary.failed > 0 && html`<span>${summary.failed} failed</span>`}</p></header>`;
}

function Side({ tree, step, close }) {
  return html`<div class="side row small"><b>step ${tree?.step ?? step}</b>${tree && html`<span>mean reward <b class="figure">${num(tree.summary.mean)}</b></span>
    <${Share} tree=${tree.summary} /><span class="soft">${plural(tree.summary.leaves, "leaf", "leaves")}</span>`}<span class="push"></span>
    ${close && html`<button class="icon" aria-label="Close the comparison" title="Close the comparison" onClick=${close}>×</button>`}</div>`;
}

function Toolbar({ tree, tools, colour, setColour, density, setDensity, at, go, panel, setPanel, two }) {
  const [failure, setFailure] = useState("");
  const flip = (name) => setPanel(panel === name ? "" : name);
  const save = async (kind) => {
    setPanel("");
    setFailure("");
    try {
      await exportTree(kind, tools.current, tree, density === "auto" ? autoDensity(tree.nodes) : density, at);
    } catch (error) {
      setFailure(error.message);
    }
  };
  const { siblings, summary } = tree;
  return html`<div class="toolbar row wrap">
    <label class="tight">colour <select value=${colour} onChange=${(event) => setColour(event.target.value)}>
      ${Object.entries(NODE_COLOURS).map(([name, text]) => html`<option value=${name}>${text}</option>`)}</select></label>
    <label class="tight">cards <select value=${density} onChange=${(event) => setDensity(event.target.value)}>
      <option value="auto">automatic</option><option value="roomy">roomy</option><option value="compact">compact</option></select></label>
    <span class="group"><button class="icon" title="Smaller  −" aria-label="Zoom out" onClick=${() => tools.current.zoomBy(1 / 1.3)}>−</button>
      <button class="icon" title="Larger  +" aria-label="Zoom in" onClick=${() => tools.current.zoomBy(1.3)}>+</button>
      <button title="The whole tree  f" onClick=${() => tools.current.fit()}>Fit</button></span>
    <span class="group"><button title="Close all branches  c" onClick=${() => tools.current.everything(true)}>Collapse</button>
      <button title="Open all branches  e" onClick=${() => tools.current.everything(false)}>Expand</button></span>
    ${siblings.length > 1 && html`<label class="tight" title="Trees of the same prompt">tree <select value=${summary.index} onChange=${(event) => go({ tree: Number(event.target.value), step: at.step, node: undefined })}>
      ${siblings.map((index, i) => html`<option value=${index}>${i + 1} of ${siblings.length}</option>`)}</select></label>`}
    ${failure && html`<span class="bad small" role="alert">${failure}</span>`}
    <div class="ends"><span class="anchor"><button aria-expanded=${panel === "same"} aria-pressed=${two} title="The same question at another step  s" onClick=${() => flip("same")}>Compare steps</button>
      ${panel === "same" && html`<${SameQuestion} place=${at} go=${(change) => go({ ...change, run: at.run, step: at.step, tree: at.tree })} onClose=${() => setPanel("")} />`}</span>
    <span class="anchor"><button aria-expanded=${panel === "export"} aria-haspopup="menu" onClick=${() => flip("export")}>Export</button>
      ${panel === "export" && html`<div class="popover menu" role="menu">${[["svg", "SVG picture"], ["png", "PNG picture"], ["json", "JSON, as stored"], ["html", "One HTML file"]]
        .map(([kind, text]) => html`<button role="menuitem" onClick=${() => save(kind)}>${text}</button>`)}</div>`}</span></div>
  </div>`;
}

async function exportTree(kind, tools, tree, density, at) {
  const name = fileName(tree, kind);
  if (kind === "svg" || kind === "png") {
    const svg = toSvg(tools, tree, density);
    download(kind === "svg" ? new Blob([svg], { type: "image/svg+xml" }) : await toPng(svg), name);
    return;
  }
  const query = new URLSearchParams({ run: at.run, step: tree.step, index: tree.summary.index });
  const answer = await fetch(`/api/export/${kind}?${query}`);
  if (!answer.ok) throw new Error((await answer.json()).message);
  download(await answer.blob(), name);
}

function Legend({ tree, colour }) {
  const scale = useMemo(() => nodeScale([...indexTree(tree.nodes).values()], colour), [tree, colour]);
  const ramp = scale.signed ? ["n4", "n3", "n2", "n1", "z", "p1", "p2", "p3", "p4"] : ["s0", "s1", "s2", "s3", "s4", "s5", "s6"];
  return html`<footer class="legend row wrap small soft"><span>${NODE_COLOURS[colour]}</span>${scale.any
    ? html`<span class="figure">${num(scale.low)}</span><span class="ramp">${ramp.map((name) => html`<i class=${name}></i>`)}</span><span class="figure">${num(scale.high)}</span>`
    : html`<span>not stored for this tree</span>`}
    <i class="gap"></i><span class="mark good">✓ right</span><span class="mark bad">✗ wrong</span><span class="mark cut">dashed: cut at a limit</span><span class="mark failed">hatched: failed</span>
    <span class="push"></span><span>drag pans · Ctrl+wheel zooms · <kbd>?</kbd> keys</span></footer>`;
}

// Keyboard ------------------------------------------------------------------------------------------------------------

function shortcut(event, now) {
  const typing = event.target.closest?.("input, textarea, select, [contenteditable]");
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") {
    if (now.panel) now.setPanel("");
    else if (typing) event.target.blur();
    else now.go({ node: undefined, side: undefined }, { replace: true });
    return;
  }
  if (typing || now.panel === "search") return;
  const action = actions(now)[event.key];
  if (!action) {
    if (event.key.startsWith("Arrow") && now.tools.current && !event.target.closest?.(".picture, .strip, [role=listbox]")) {
      const frame = now.tools.current.frame.current;
      event.preventDefault();
      frame?.focus({ preventScroll: true });
      frame?.dispatchEvent(new KeyboardEvent("keydown", { key: event.key }));
    }
    return;
  }
  event.preventDefault();
  action();
}

function actions({ at, go, steps, trees, setPanel, panel, tools, theme, setTheme, setWide, wide, setFollow }) {
  const toStep = (delta) => () => {
    const next = steps[steps.findIndex((item) => item.step === at.step) + delta];
    if (!next) return;
    setFollow(false);
    go({ step: next.step, tree: undefined, node: undefined, vstep: undefined, vtree: undefined, side: undefined });
  };
  const toTree = (delta) => () => {
    const rows = [...document.querySelectorAll(".trees [data-tree]")].map((row) => Number(row.dataset.tree));
    const next = rows[rows.indexOf(at.tree) + delta];
    if (trees && next !== undefined) go({ step: at.step, tree: next, node: undefined, vstep: undefined, vtree: undefined, side: undefined });
  };
  const view = (name, ...args) => () => tools.current?.[name](...args);
  return {
    "/": () => setPanel("search"), "?": () => setPanel(panel === "help" ? "" : "help"),
    "[": toStep(-1), "]": toStep(1), j: toTree(1), k: toTree(-1),
    f: view("fit"), "+": view("zoomBy", 1.3), "=": view("zoomBy", 1.3), "-": view("zoomBy", 1 / 1.3),
    c: view("everything", true), e: view("everything", false), s: () => setPanel(panel === "same" ? "" : "same"),
    t: () => setTheme(nextTheme(theme)), w: () => setWide(!wide),
    ...Object.fromEntries(Object.keys(TABS).map((name, i) => [String(i + 1), () => go({ node: at.node ?? "root", step: at.step, tree: at.tree, tab: i ? name : undefined })])),
  };
}

const page = document.getElementById("app");
page.replaceChildren();
render(html`<${App} />`, page);
