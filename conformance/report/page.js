// Filters for the lists and copying of commands. Without it the page lacks nothing but these.
"use strict";
for (const form of document.querySelectorAll("form[data-filter]")) {
  const checks = [...document.getElementById(form.dataset.filter).querySelectorAll(".check")];
  const texts = checks.map((check) => check.textContent.toLowerCase());
  const said = form.querySelector("output");
  const filter = () => {
    const wanted = form.elements.find.value.toLowerCase().split(/\s+/).filter(Boolean);
    const verdict = form.elements.verdict.value;
    const group = form.elements.group.value;
    let shown = 0;
    checks.forEach((check, index) => {
      const fits =
        (!verdict || check.dataset.verdict === verdict) &&
        (!group || check.dataset.group === group) &&
        wanted.every((word) => texts[index].includes(word));
      check.hidden = !fits;
      shown += fits;
      for (const row of check.querySelectorAll("tbody tr")) {
        const text = (check.firstChild.textContent + " " + row.textContent).toLowerCase();
        row.hidden = !wanted.every((word) => text.includes(word));
      }
    });
    said.textContent = `${shown} of ${checks.length} checks`;
  };
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = false;
  filter();
}
for (const box of document.querySelectorAll("input[data-differing]")) {
  const rows = document.getElementById(box.dataset.differing).querySelectorAll("tr[data-same]");
  const filter = () => rows.forEach((row) => (row.hidden = box.checked));
  box.addEventListener("change", filter);
  box.parentElement.hidden = false;
  filter();
}
for (const button of document.querySelectorAll("button[data-copy]")) {
  const command = button.previousElementSibling;
  button.hidden = false;
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(command.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(command);
      button.textContent = "Selected";
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
}
