//! Two connections communicate over a link that loses chosen segments.

use super::super::segment::{ACK, FIN, RST, SYN, Segment, Seq};
use super::buffer::Budget;
use super::*;

/// A segment with its data.
type Sent = (Segment<'static>, Vec<u8>);

fn start(first: u32, mss: u16, now: Instant) -> Parameters {
    Parameters { ports: (80, 4000), first: Seq(first), mss, budget: Budget::default(), now }
}

/// All segments that it sends now.
fn emit(tcp: &mut Tcp, now: Instant) -> Vec<Sent> {
    let mut sent = Vec::new();
    tcp.emit(now, &mut |segment| {
        sent.push((Segment { data: &[], ..*segment }, segment.data.to_vec()));
        true
    });
    sent
}

fn handle(tcp: &mut Tcp, (segment, data): &Sent, now: Instant) {
    tcp.handle(&Segment { data, ..*segment }, now);
}

#[test]
fn an_idle_connection_releases_its_buffers() {
    let Pair { mut near, .. } = Pair::new(1460);
    assert!(near.is_loaded(), "it had memory from the start");
    near.release();
    assert!(!near.is_loaded());
}

/// Two connected ends, and the time.
struct Pair {
    near: Tcp,
    far: Tcp,
    now: Instant,
}

impl Pair {
    fn new(mss: u16) -> Self {
        let now = Instant::now();
        let mut near = Tcp::to_guest(&start(u32::MAX - 5000, mss, now));
        let syn = emit(&mut near, now).remove(0);
        assert_eq!((syn.0.flags, syn.0.mss), (SYN, Some(mss)));
        let mut far = Tcp::from_guest(&start(7, mss, now), &syn.0);
        assert!(emit(&mut far, now).is_empty(), "nothing before the outside has connected");
        far.connected();
        let answer = emit(&mut far, now).remove(0);
        assert_eq!(answer.0.flags, SYN | ACK);
        handle(&mut near, &answer, now);
        for sent in emit(&mut near, now) {
            handle(&mut far, &sent, now);
        }
        assert_eq!((near.state, far.state), (State::Established, State::Established));
        Self { near, far, now }
    }

    /// Carries segments both ways until both ends are quiet. `lost` chooses segments by number.
    fn settle(&mut self, mut lost: impl FnMut(usize) -> bool) {
        let (mut number, mut quiet) = (0, 0);
        while quiet < 3 {
            let (there, back) = (emit(&mut self.near, self.now), emit(&mut self.far, self.now));
            quiet = if there.is_empty() && back.is_empty() { quiet + 1 } else { 0 };
            for sent in there {
                number += 1;
                if !lost(number) {
                    handle(&mut self.far, &sent, self.now);
                }
            }
            for sent in back {
                number += 1;
                if !lost(number) {
                    handle(&mut self.near, &sent, self.now);
                }
            }
            if quiet > 0 {
                self.now += Duration::from_secs(1);
                self.near.tick(self.now);
                self.far.tick(self.now);
            }
        }
    }

    fn put(&mut self, data: &[u8]) -> usize {
        let count = self.near.space().min(data.len());
        self.near.fill(count, |buffer| buffer.extend_from_slice(&data[..count]));
        count
    }

    fn got(&mut self) -> Vec<u8> {
        let data = self.far.data().to_vec();
        self.far.take(data.len());
        data
    }
}

#[test]
fn data_arrives_whole_despite_packet_loss() {
    for percent in [0, 1, 5, 20, 40] {
        let mut pair = Pair::new(1460);
        let data: Vec<u8> =
            (0..2_000_000_u32).map(|it| it.to_be_bytes()[1] ^ it.to_be_bytes()[3]).collect();
        let (mut put, mut got) = (0, Vec::new());
        let mut dice = 1_u64;
        let mut lost = move |_| {
            dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (dice >> 33) % 100 < percent
        };
        while got.len() < data.len() {
            put += pair.put(&data[put..]);
            // The losses differ each time, so that every segment arrives in the end.
            pair.settle(&mut lost);
            assert_eq!(pair.near.state, State::Established, "with {percent} in 100 lost");
            got.extend(pair.got());
        }
        assert!(got == data, "with {percent} in 100 lost");
        pair.near.finish();
        pair.far.finish();
        pair.settle(|_| false);
        pair.settle(|_| false);
        assert!(pair.near.is_done() && pair.far.is_done(), "with {percent} in 100 lost");
    }
}

#[test]
fn a_closed_window_is_probed_and_reopens() {
    let mut pair = Pair::new(1460);
    let data = vec![5; 4 << 20];
    let mut put = 0;
    for _ in 0..20 {
        put += pair.put(&data[put..]);
        pair.settle(|_| false);
    }
    let held = pair.far.data().len();
    assert!(held <= 64 << 10 && put - held <= MAX_CAPACITY, "{held} of {put}");
    // The window update is lost, and a probe finds out.
    let mut got = pair.got().len();
    emit(&mut pair.far, pair.now);
    for _ in 0..60 {
        pair.now += MAX_RETRY;
        pair.near.tick(pair.now);
        pair.settle(|_| false);
        got += pair.got().len();
    }
    assert_eq!(got, put);
}

#[test]
fn a_vanished_guest_is_detected() {
    let mut pair = Pair::new(1460);
    let mut asked = 0;
    for _ in 0..100 {
        let Some(due) = pair.near.due() else { break };
        pair.now = due;
        pair.near.tick(due);
        asked += emit(&mut pair.near, due).len();
    }
    assert_eq!(pair.near.state, State::Closed);
    assert!(asked > 5);
    // A guest that answers keeps its connection.
    for _ in 0..100 {
        let due = pair.far.due().unwrap();
        pair.now = due;
        pair.far.tick(due);
        let (now, far) = (due, &mut pair.far);
        let ack = emit(far, now).remove(0).0;
        let answer = Segment { seq: ack.ack, ack: ack.seq.plus(1), flags: ACK, window: 9, ..ack };
        far.handle(&answer, now);
    }
    assert_eq!(pair.far.state, State::Established);
}

#[test]
fn a_reset_is_accepted_only_at_the_next_sequence_number() {
    let mut pair = Pair::new(1460);
    let (next, ack) = (pair.far.receiver.next, pair.far.sender.next);
    let reset = |seq| Segment { seq, ack, flags: RST, ..Segment::default() };
    pair.far.handle(&reset(next.plus(1)), pair.now);
    assert_eq!(emit(&mut pair.far, pair.now).remove(0).0.flags, ACK, "a challenge");
    pair.far.handle(&reset(Seq(next.0.wrapping_sub(1))), pair.now);
    assert!(emit(&mut pair.far, pair.now).is_empty());
    pair.far.handle(&reset(next), pair.now);
    assert_eq!(pair.far.state, State::Closed);
}

#[test]
fn a_syn_on_an_open_connection_gets_a_challenge_ack() {
    let mut pair = Pair::new(1460);
    let syn = Segment { seq: Seq(99), flags: SYN, ..Segment::default() };
    pair.far.handle(&syn, pair.now);
    assert_eq!(emit(&mut pair.far, pair.now).remove(0).0.flags, ACK);
    assert_eq!(pair.far.state, State::Established);
}

#[test]
fn an_abort_sends_one_reset() {
    let mut pair = Pair::new(1460);
    pair.far.abort();
    let sent = emit(&mut pair.far, pair.now);
    assert_eq!((sent.len(), sent[0].0.flags), (1, RST | ACK));
    handle(&mut pair.near, &sent[0], pair.now);
    assert_eq!((pair.near.state, pair.far.state), (State::Closed, State::Closed));
}

#[test]
fn fin_is_sent_with_the_last_data() {
    let mut pair = Pair::new(1460);
    pair.put(b"all");
    pair.near.finish();
    let sent = emit(&mut pair.near, pair.now);
    assert_eq!((sent.len(), sent[0].0.flags & FIN), (1, FIN));
    handle(&mut pair.far, &sent[0], pair.now);
    assert_eq!(pair.got(), b"all");
    assert!(pair.far.has_ended());
}

#[test]
fn reorders_segments() {
    let mut pair = Pair::new(1460);
    let data: Vec<u8> = (0..14_600_u32).map(|it| it.to_be_bytes()[3]).collect();
    pair.put(&data);
    pair.near.finish();
    let mut sent = emit(&mut pair.near, pair.now);
    assert_eq!(sent.len(), 10);
    sent.reverse();
    let first = sent.pop().unwrap();
    for early in &sent {
        handle(&mut pair.far, early, pair.now);
    }
    let told = emit(&mut pair.far, pair.now);
    assert!(told.len() > 3 && told.iter().all(|it| it.0.ack == first.0.seq), "{told:?}");
    handle(&mut pair.far, &first, pair.now);
    assert!(pair.got() == data && pair.far.has_ended());
}

#[test]
fn buffers_of_many_connections_stay_near_the_budget() {
    const MANY: usize = 600;
    for mss in [1460, 65480] {
        let (now, budget) = (Instant::now(), Budget::new(8 << 20));
        let start = Parameters { budget, ..start(7, mss, now) };
        let mut all = Vec::new();
        for _ in 0..MANY {
            let syn = Segment { flags: SYN, mss: Some(mss), scale: Some(7), ..Segment::default() };
            let mut tcp = Tcp::from_guest(&start, &syn);
            tcp.connected();
            emit(&mut tcp, now);
            let plain = Segment { seq: Seq(1), flags: ACK, ack: Seq(8), ..Segment::default() };
            tcp.handle(&plain, now);
            // A part of the window in order, and then overlapping segments behind a gap.
            let window = tcp.receiver.window(false);
            let window = usize::from(window) << tcp.receiver.scale;
            let data = vec![0; window.max(mss.into())];
            tcp.handle(&Segment { data: &data[..window / 2], ..plain }, now);
            let data = &data[..mss.into()];
            for at in (window / 2 + 1..window).step_by(397) {
                let data = &data[..data.len().min(window - at)];
                tcp.handle(&Segment { seq: Seq(1).plus(at), data, ..plain }, now);
            }
            while let space @ 1.. = tcp.space() {
                tcp.fill(space, |buffer| buffer.extend(vec![0; space]));
            }
            all.push(tcp);
        }
        let held: usize = all.iter().map(|it| it.sender.data.len() + it.receiver.held()).sum();
        let max = MANY * 2 * buffer::MIN_CAPACITY + (8 << 20);
        assert!(held <= max, "{held} bytes of {max}");
        assert!(held > max / 2, "{held} bytes are no test");
    }
}
