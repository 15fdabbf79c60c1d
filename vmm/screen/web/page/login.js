// Browsers may fill in the name by themselves, or set the focus elsewhere.
const [name, password] = ["user", "password"].map((it) => document.querySelector(`[name=${it}]`));
(name.checkVisibility() && !name.value ? name : password).focus();

// A link on another site sends no cookie of ours, so even users who are logged in land here.
const session = await fetch("session").catch(() => null);
if (session?.ok) {
  location.replace("./");
}
