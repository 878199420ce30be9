// Runs before the first paint: sets the scheme that the reader chose last, else that of the system.
(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const recall = () => { try { return localStorage.getItem("kalmannorm-theme"); } catch { return null; } };
  const keep = (theme) => { try { localStorage.setItem("kalmannorm-theme", theme); } catch { /* storage may be blocked for files */ } };
  const chosen = recall();
  if (chosen === "light" || chosen === "dark") root.dataset.theme = chosen;
  const changed = () => document.dispatchEvent(new Event("schemechange"));
  system.addEventListener("change", changed);
  document.addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", () => {
      const now = root.dataset.theme || (system.matches ? "dark" : "light");
      root.dataset.theme = now === "dark" ? "light" : "dark";
      keep(root.dataset.theme);
      changed();
    });
  });
})();
