const name = document.querySelector(".named [name=user]");
if (name && !name.value) {
  name.focus();
}

// A link from elsewhere comes without our cookie, so that even those who are in land here.
const session = await fetch("session").catch(() => null);
if (session?.ok) {
  location.replace("./");
}
