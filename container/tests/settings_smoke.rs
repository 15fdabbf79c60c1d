//! The fuzzer of the environment, for as long as a test may take and always the same.

mod hostile_environment;

use container::settings::list;
use container::settings::translate::table::TABLE;

const ROUNDS: u64 = 100_000;

/// What values are made of, besides names and QEMU's words.
const PARTS: &[&str] = &[
    "=",
    ",",
    ",,",
    ":",
    " ",
    "\"",
    "'",
    "\\",
    "-",
    "--",
    "+",
    "/",
    "..",
    "@",
    "%",
    "0",
    "1",
    "130",
    "65536",
    "4294967296",
    "18446744073709551616",
    "1e999",
    ".5",
    "8G",
    "half",
    "max",
    "inf",
    "NaN",
    "y",
    "off",
    "file=/x",
    "id=a",
    "drive=a",
    "if=none",
    "if=virtio",
    "media=cdrom",
    "type=1",
    "serial=",
    "string=x",
    "name=opt/x",
    "base=utc",
    "sockets=2",
    "threads=",
    "https://",
    "?",
    "#",
    ".iso",
    "\u{e9}",
    "\u{130}",
    "\u{202e}",
    "\u{0}",
    "\n",
    "\u{1b}[2J",
    "\u{1f600}",
];

/// Numbers without end that are the same for the same seed (splitmix64).
struct Noise(u64);

impl Noise {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((mixed ^ mixed >> 31) % limit as u64).expect("it is below a length")
    }
}

#[test]
fn whatever_stands_in_the_environment_is_read_or_refused_in_a_sentence() {
    let words: Vec<&str> = TABLE.iter().flat_map(|row| row.words).copied().collect();
    let variables = list::all().count();
    let arguments = list::all().position(|it| it.name == "ARGUMENTS").expect("it is in the list");
    for seed in 0..ROUNDS {
        let mut noise = Noise(seed);
        let mut text = String::new();
        for _ in 0..noise.below(14) {
            let parts = if noise.below(3) == 0 { &words } else { PARTS };
            text += parts[noise.below(parts.len())];
        }
        let number = if seed % 3 == 0 { arguments } else { noise.below(variables) };
        hostile_environment::set(number, &text);
    }
}

#[test]
fn a_very_long_text_is_no_danger() {
    for part in PARTS.iter().chain(&["-drive file=/x,id=a,if=none ", "-device usb-host ", "1,"]) {
        let text = part.repeat(20_000);
        for (number, _) in list::all().enumerate() {
            hostile_environment::set(number, &text);
        }
    }
}
