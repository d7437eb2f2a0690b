for (const [id, open] of [["open", true], ["close", false]]) {
  document.getElementById(id).addEventListener("click", () => {
    for (const card of document.querySelectorAll("details.card")) card.open = open;
  });
}
