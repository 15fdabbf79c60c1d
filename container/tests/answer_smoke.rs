//! Long and deep answer files of users. The fuzz target `answer` covers the rest.

mod hostile_answer;

/// Parts of answer files.
const PARTS: &[&str] = &[
    "<",
    ">",
    "<a>",
    "</a>",
    "<a/>",
    "<a b=\"",
    "&lt;",
    "&",
    "<!--",
    "-->",
    "<![CDATA[",
    "]]>",
    "<?xml ",
    "?>",
    "\"",
    "<!DOCTYPE ",
    "<DiskID/>",
    "<Password>",
    "\u{feff}",
    "\n",
    "encoding=",
];

#[test]
fn a_very_long_file_is_no_danger() {
    for part in PARTS {
        let text = part.repeat(20_000);
        for kind in 0..2 {
            for start in ["", "<unattend>", "<?xml version=\"1.0\" "] {
                hostile_answer::change(&[&[kind], start.as_bytes(), text.as_bytes()].concat());
            }
        }
    }
}

#[test]
fn a_file_as_users_write_it_is_changed_once() {
    let text = "<?xml version=\"1.0\" encoding=\"utf-8\"?><unattend>\
                <settings pass=\"windowsPE\"><component name=\"Microsoft-Windows-Setup\">\
                <Disk><DiskID>0</DiskID></Disk></component></settings><Password/></unattend>";
    for kind in 0..2 {
        hostile_answer::change(&[&[kind], text.as_bytes()].concat());
    }
}
