// Where browsers fill in a name by themselves, or set the focus elsewhere.
const [name, password] = ["user", "password"].map((it) => document.querySelector(`[name=${it}]`));
(name.checkVisibility() && !name.value ? name : password).focus();

// A link from elsewhere comes without our cookie, so that even those who are in land here.
const session = await fetch("session").catch(() => null);
if (session?.ok) {
  location.replace("./");
}
