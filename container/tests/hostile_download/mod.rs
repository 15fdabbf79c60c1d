//! Replies of download pages, catalogs, headers of files, and notes on unfinished downloads.

use container::download::address::Address;
use container::download::ask::{Reply, Step, Way};
use container::download::consumer::Consumer;
use container::download::esd::{self, Esd};
use container::download::evaluation::Evaluation;
use container::download::pieces::Pieces;
use container::download::sidecar::Sidecar;
use container::download::{cab, transfer};
use container::settings::language::Language;
use container::settings::version::Version;
use container::state::name;
use host::uuid::Uuid;

/// Replies that lead to a link, each to the question before.
pub(crate) const REPLIES: [&str; 6] = [
    "<option value=\"3813\">Windows 11</option><td>German 64-bit</td><td>00</td>",
    "",
    "url:\"https://ov-df.microsoft.com/?session_id=1&w=8DF26E07265FC0D\";\"&rticks=\"+1791644954371;",
    "",
    "{\"Skus\":[{\"Id\":\"19001\",\"Language\":\"German\"}]}",
    "{\"ProductDownloadOptions\":[{\"Uri\":\"https://a.microsoft.com/x.iso\",\"DownloadType\":1}]}",
];

/// The first byte selects the reader.
pub(crate) fn read(bytes: &[u8]) {
    let Some((kind, rest)) = bytes.split_first() else { return };
    match kind % 8 {
        0..=2 => consumer(rest),
        3 => evaluation(rest),
        4 => cabinet(rest),
        5 => headers(&String::from_utf8_lossy(rest)),
        6 => note(&String::from_utf8_lossy(rest)),
        _ => catalog(&String::from_utf8_lossy(rest)),
    }
}

/// Replaces one of the replies. The first byte is its number, and its status.
fn consumer(bytes: &[u8]) {
    let Some((number, body)) = bytes.split_first() else { return };
    let page = "https://www.microsoft.com/en-us/software-download/windows11";
    let mut way = Consumer::new(page, 3321, "German", Uuid::random().expect("noise"), 1);
    let at = usize::from(*number) % REPLIES.len();
    let status = [200, 200, 204, 301, 403, 429, 500, 999][usize::from(*number >> 5)];
    for (other, good) in REPLIES.iter().enumerate() {
        let reply = match other == at {
            true => Reply { status, body: body.to_vec(), ..Reply::default() },
            false => Reply { status: 200, body: (*good).into(), ..Reply::default() },
        };
        if !check(&way.next(&reply)) {
            return;
        }
    }
}

fn evaluation(bytes: &[u8]) {
    let reply = Reply { status: 200, body: bytes.to_vec(), ..Reply::default() };
    for number in 0..3 {
        check(&Evaluation::new("windows-server-2025", "en-US", number).next(&reply));
    }
}

/// Whether the way goes on. Whatever a reply says, the next request goes to Microsoft.
fn check(step: &Result<Step, container::download::fault::Fault>) -> bool {
    let url = match step {
        Ok(Step::Ask(question)) => &question.url,
        Ok(Step::Found(link)) => &link.url,
        Err(fault) => {
            let said = fault.to_string();
            assert!(said.len() < 1024 && !said.contains(char::is_control), "{said:?}");
            return false;
        }
    };
    if let Ok(address) = Address::read(url) {
        assert!(address.secure && address.host.ends_with(".microsoft.com"), "{url}");
    }
    assert!(url.starts_with("https://") && !url.contains(char::is_control), "{url:?}");
    true
}

fn cabinet(bytes: &[u8]) {
    let whole = [b"MSCF\0\0\0\0", bytes].concat();
    for bytes in [bytes, &whole] {
        for name in ["products.xml", "a", ""] {
            if let Ok(content) = cab::file(bytes, name) {
                assert!(content.len() <= 64 << 20);
            }
        }
        let reply = Reply { status: 200, body: bytes.to_vec(), ..Reply::default() };
        let mut way = Esd { catalog: 1, edition: "Professional", culture: "de-DE" };
        check(&way.next(&reply));
    }
}

fn catalog(text: &str) {
    if let Some(link) = esd::find(text, "Professional", "de-DE") {
        check(&Ok(Step::Found(link)));
    }
}

fn headers(text: &str) {
    if let Some((start, whole)) = transfer::content_range(text) {
        assert!(start < whole, "{text}");
    }
    let version = Version::Url(text.to_owned());
    let name = name::of(&version, Language::default().0).expect("a name");
    assert_eq!(name::of_base(&name), Some(name));
    let name = name::of_drivers(text);
    assert!(name::of_base(&name) == Some(name.clone()) && name.starts_with(name::DRIVERS));
    let from = Address::read("https://a.example/b/c").expect("an address");
    for address in [Address::read(text), from.redirected(text)].into_iter().flatten() {
        assert!(!address.host.is_empty() && !address.shown().contains(char::is_control));
        assert!(!address.path().contains(['\r', '\n', ' ']), "{address:?}");
    }
    assert!(from.redirected(text).map_or(true, |it| it.secure), "{text}");
}

fn note(text: &str) {
    let Some(note) = Sidecar::parse(text) else { return };
    let length = note.identity.length;
    // The downloader compares the length with the server's before it counts pieces.
    if length > 1 << 40 {
        return;
    }
    let mut pieces = Pieces::new(length);
    for (start, end) in &note.done {
        pieces.finish(*start..*end);
    }
    let done: u64 = pieces.done().iter().map(|run| run.end - run.start).sum();
    let noted: u64 = note.done.iter().map(|(start, end)| end - start).sum();
    assert!(done == noted && done <= length, "{done} of {length}");
}
