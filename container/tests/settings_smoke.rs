//! Very long values of variables. The fuzz target `settings` covers the rest.

mod hostile_environment;

use container::settings::list;

/// Parts of values.
const PARTS: &[&str] = &[
    "=", ",", ":", " ", "\"", "\\", "-", "/", "..", "@", "%", "1", "half", "file=/x", "https://",
    "\u{e9}", "\u{202e}", "\u{0}", "\n",
];

#[test]
fn survives_a_very_long_text() {
    for part in PARTS.iter().chain(&["-drive file=/x,id=a,if=none ", "-device usb-host ", "1,"]) {
        let text = part.repeat(20_000);
        for (number, _) in list::all().enumerate() {
            hostile_environment::set(number, &text);
        }
    }
}
