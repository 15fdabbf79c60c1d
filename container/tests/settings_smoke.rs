//! Values of variables that are very long; the fuzz target `settings` says the rest.

mod hostile_environment;

use container::settings::list;

/// What values are made of.
const PARTS: &[&str] = &[
    "=", ",", ":", " ", "\"", "\\", "-", "/", "..", "@", "%", "1", "half", "file=/x", "https://",
    "\u{e9}", "\u{202e}", "\u{0}", "\n",
];

#[test]
fn a_very_long_text_is_no_danger() {
    for part in PARTS.iter().chain(&["-drive file=/x,id=a,if=none ", "-device usb-host ", "1,"]) {
        let text = part.repeat(20_000);
        for (number, _) in list::all().enumerate() {
            hostile_environment::set(number, &text);
        }
    }
}
