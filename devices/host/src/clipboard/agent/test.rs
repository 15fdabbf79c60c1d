//! Texts in both directions, with agents of Linux and Windows, and hostile ones.

use std::sync::{Arc, Mutex};

use super::*;
use crate::clipboard::Hub;
use crate::testutil::agent::{GuestAgent, LINUX, WINDOWS};

struct Bench {
    hub: Arc<Hub>,
    copied: Arc<Mutex<Vec<String>>>,
}

fn bench() -> Bench {
    let (hub, copied) = (Arc::<Hub>::default(), Arc::<Mutex<Vec<String>>>::default());
    let place = copied.clone();
    hub.on_copied(Box::new(move |text| place.lock().unwrap().push(text.into())));
    Bench { hub, copied }
}

impl Bench {
    fn copied(&self) -> Vec<String> {
        take(&mut self.copied.lock().unwrap())
    }
}

#[test]
fn texts_go_both_ways_with_the_line_ends_of_each_side() {
    for (capabilities, lines) in [(LINUX, "é\nb€\n"), (WINDOWS, "é\r\nb€\r\n")] {
        let bench = bench();
        assert!(!bench.hub.has_agent());
        bench.hub.offer("nobody is there");
        let mut guest = GuestAgent::start(&bench.hub, capabilities);
        assert!(bench.hub.has_agent() && guest.texts.is_empty());
        bench.hub.offer("é\nb€\n");
        guest.serve();
        assert_eq!(guest.texts.pop_front().as_deref(), Some(lines));
        guest.copy(b"\xc3\xa9\r\nb\n\0");
        assert_eq!(bench.copied(), ["é\nb\n"]);
        guest.copy(b"\xff");
        assert_eq!(bench.copied(), ["\u{fffd}"], "texts that are not UTF-8 are mended");
    }
}

#[test]
fn long_texts_go_in_chunks_and_longer_ones_not_at_all() {
    let bench = bench();
    let mut guest = GuestAgent::start(&bench.hub, LINUX);
    assert!(guest.kinds.contains(&MAX_CLIPBOARD), "the guest learns of the limit");
    let long = "x".repeat(MAX_TEXT_BYTES);
    bench.hub.offer(&long);
    guest.serve();
    assert_eq!(guest.texts.pop_front().as_ref(), Some(&long));
    guest.copy(long.as_bytes());
    assert_eq!(bench.copied(), [long.as_str()]);
    guest.copy(&vec![b'x'; MAX_TEXT_BYTES + 1]);
    assert!(bench.copied().is_empty());
    guest.copy(b"short");
    assert_eq!(bench.copied(), ["short"], "what follows a skipped message is read");
    bench.hub.offer(&format!("{long}x"));
    guest.serve();
    assert!(guest.texts.is_empty());
}

#[test]
fn a_new_agent_starts_anew_even_in_the_middle_of_a_message() {
    let bench = bench();
    let mut guest = GuestAgent::start(&bench.hub, LINUX);
    assert!(bench.hub.port().is_err(), "one port has the clipboard");
    bench.hub.offer("before");
    let port = &[1, 0, 0, 0, 200, 0, 0, 0, 1, 0, 0][..];
    guest.send(7, &[]);
    guest.restart_after(port);
    guest.copy(b"after");
    assert_eq!(bench.copied(), ["after"]);
    assert!(guest.texts.is_empty(), "the text was for the agent before");
    drop(guest);
    assert!(!bench.hub.has_agent());
    GuestAgent::start(&bench.hub, LINUX);
}

#[test]
fn unasked_texts_other_clipboards_and_other_formats_are_ignored() {
    let bench = bench();
    let mut guest = GuestAgent::start(&bench.hub, WINDOWS);
    let text = [&UTF8_TEXT.to_le_bytes()[..], b"spam"].concat();
    guest.send(CLIPBOARD, &text);
    guest.send(GRAB, &2_u32.to_le_bytes());
    guest.send(CLIPBOARD, &text);
    guest.serve();
    assert!(bench.copied().is_empty() && !guest.kinds.contains(&REQUEST));
    drop(guest);
    let mut guest = GuestAgent::start(&bench.hub, LINUX);
    guest.send_as_is(GRAB, &[1_u32, UTF8_TEXT].map(u32::to_le_bytes).concat());
    guest.serve();
    assert!(!guest.kinds.contains(&REQUEST), "X11's selection is not the clipboard");
}

#[test]
fn viewers_get_a_limited_number_of_texts() {
    let bench = bench();
    let mut guest = GuestAgent::start(&bench.hub, WINDOWS);
    for _ in 0..3 * REQUESTS.0 {
        guest.copy(b"text");
        // A guest may close its port and open it again.
        guest.restart_after(&[]);
    }
    assert_eq!(bench.copied().len(), REQUESTS.0);
    bench.hub.state().agent.requests.iter_mut().for_each(|it| *it -= 2 * REQUESTS.1);
    guest.copy(b"later");
    assert_eq!(bench.copied(), ["later"]);
    // Without having read the request.
    guest.send(GRAB, &UTF8_TEXT.to_le_bytes());
    guest.send(CLIPBOARD, &[&UTF8_TEXT.to_le_bytes()[..], b"early"].concat());
    assert!(bench.copied().is_empty());
}

#[test]
fn a_guest_that_asks_without_reading_costs_nothing() {
    let bench = bench();
    let mut guest = GuestAgent::start(&bench.hub, LINUX);
    bench.hub.offer(&"x".repeat(MAX_TEXT_BYTES));
    for _ in 0..10_000 {
        guest.send(REQUEST, &UTF8_TEXT.to_le_bytes());
        guest.send(ANNOUNCE, &[1, LINUX].map(u32::to_le_bytes).concat());
    }
    let size = bench.hub.state().agent.out.len();
    assert!(size <= CHUNK, "{size} bytes are waiting");
    guest.serve();
    assert_eq!(guest.texts.len(), usize::from(MAX_REPLIES) + 1, "and one for the announcement");
}
