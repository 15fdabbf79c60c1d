//! Trees of files for the set-up disk: paths in lines.

use host::testutil::noise::Noise;

const MAX_PATHS: u64 = 60;
/// Parts of names, most of which every file system takes.
const PARTS: [&str; 24] = [
    "a",
    "A",
    "b",
    "file",
    "FILE",
    "~1",
    "~",
    ".txt",
    ".TXT",
    ".",
    "..",
    " ",
    "+",
    "[",
    "$OEM$",
    "\u{e9}",
    "\u{df}",
    "\u{d55c}",
    "\u{1f600}",
    "averylongnamethatgoeson",
    "con",
    "com1",
    "0",
    "-",
];
const FORBIDDEN: [&str; 6] = [":", "\\", "\"", "\u{7f}", "\u{0}", "//"];

/// Paths of files and folders. Most are below a folder that came before.
pub(crate) fn make(noise: &mut Noise) -> Vec<u8> {
    let mut folders = vec![String::new()];
    let mut lines = String::new();
    for _ in 0..noise.below(MAX_PATHS) {
        let above = usize::try_from(noise.below(folders.len() as u64)).expect("below a length");
        let mut path = folders[above].clone() + &name(noise);
        if noise.below(4) == 0 {
            path.push('/');
            folders.push(path.clone());
        }
        lines.push_str(&path);
        lines.push('\n');
    }
    lines.into_bytes()
}

fn name(noise: &mut Noise) -> String {
    let mut name = String::new();
    for _ in 0..=noise.below(4) {
        name.push_str(noise.choose(&PARTS));
    }
    if noise.below(200) == 0 {
        name.push_str(noise.choose(&FORBIDDEN));
    }
    // Few names end with a dot or a space, or are there twice.
    if noise.below(20) > 0 {
        name.push_str(&noise.below(1000).to_string());
    }
    name
}
