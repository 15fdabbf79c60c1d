//! Hypercalls (TLFS 3, 9 and 11): flushes of address translations, and interrupts to processors.
//! Each has a form for 64 processors and one for more, and takes its input from memory or from
//! registers.
use crate::Session;
use crate::cpu::Cpu;
use crate::entry::PEER_VECTOR;
use crate::gate::hypercall;
use crate::hyperv::{
    CLUSTER_IPI, EXTENDED_MASKS, Interface, REMOTE_FLUSH, SYNIC, VP_INDEX, XMM_INPUT, skip,
};
use crate::io::write64;
use crate::memory::Room;
use crate::paging::Remapped;
use crate::peers::Peer;
use crate::report::Finding;

pub(crate) const INVALID_CODE: u64 = 2;
/// The answers to an impossible vector: KVM's, and the TLFS'.
const INVALID_INPUTS: [u64; 2] = [3, 5];
const FLUSH_SPACE: u64 = 0x02;
const FLUSH_LIST: u64 = 0x03;
const SEND_IPI: u64 = 0x0b;
const POST_MESSAGE: u64 = 0x5c;
const SIGNAL_EVENT: u64 = 0x5d;
/// There is no such call, access is denied, there is no such port or connection.
const REFUSALS: [u64; 4] = [INVALID_CODE, 6, 0x11, 0x12];
const FLUSH_SPACE_EX: u64 = 0x13;
const FLUSH_LIST_EX: u64 = 0x14;
const SEND_IPI_EX: u64 = 0x15;
const FAST: u64 = 1 << 16;
const BANK: u64 = 1 << 17;
const REPEAT: u64 = 1 << 32;
/// Flags of a flush: all processors; all address spaces.
const ALL_PROCESSORS: u64 = 1;
const ALL_SPACES: u64 = 2;
/// Formats of a set of processors.
const SPARSE: u64 = 0;
const ALL: u64 = 1;
/// A pair of registers, and six of 16 bytes.
const WORDS: usize = 14;
const TIMEOUT_MS: u64 = 2000;

/// The status of a call that does not exist.
pub(crate) fn unknown(page: u64) -> u64 {
    hypercall(page, 0x0777 | FAST, [0; 2], &[[0; 2]; 6])
}

/// Where calls go, and the page for their input.
struct Caller {
    page: u64,
    input: u64,
    xmm: bool,
}

/// A call's control word and input.
struct Call<'a> {
    control: u64,
    words: &'a [u64],
}

impl Caller {
    fn open(interface: &Interface, room: &mut Room, page: u64) -> Option<Self> {
        Some(Self { page, input: room.take(4096)?, xmm: interface.has(XMM_INPUT) })
    }

    /// Makes a call with its input in memory, or in registers as far as they may be used.
    fn call(&self, call: &Call, fast: bool) -> u64 {
        if !fast || (call.words.len() > 2 && !self.xmm) {
            for (at, word) in (self.input..).step_by(8).zip(call.words) {
                write64(at, *word);
            }
            return hypercall(self.page, call.control, [self.input, 0], &[[0; 2]; 6]);
        }
        let mut words = [0; WORDS];
        for (to, word) in words.iter_mut().zip(call.words) {
            *to = *word;
        }
        let xmm = core::array::from_fn(|index| [words[2 + 2 * index], words[3 + 2 * index]]);
        hypercall(self.page, call.control | FAST, [words[0], words[1]], &xmm)
    }
}

/// The ways to name the processors of a flush, which are below 64.
#[derive(Clone, Copy)]
enum Form {
    Mask,
    Everybody,
    Set,
    FullSet,
}

/// The words of a flush of one page, or of all.
fn flush_words(form: Form, mask: u64, address: Option<u64>) -> (u64, [u64; 6], usize) {
    let (code, banks, mut words, mut used) = match form {
        Form::Mask => (FLUSH_SPACE, 0, [0, ALL_SPACES, mask, 0, 0, 0], 3),
        Form::Everybody => (FLUSH_SPACE, 0, [0, ALL_SPACES | ALL_PROCESSORS, 0, 0, 0, 0], 3),
        Form::Set => (FLUSH_SPACE_EX, BANK, [0, ALL_SPACES, SPARSE, 1, mask, 0], 5),
        Form::FullSet => (FLUSH_SPACE_EX, 0, [0, ALL_SPACES, ALL, 0, 0, 0], 4),
    };
    let Some(address) = address else { return (code | banks, words, used) };
    words[used] = address;
    used += 1;
    let code = if code == FLUSH_SPACE { FLUSH_LIST } else { FLUSH_LIST_EX };
    (code | banks | REPEAT, words, used)
}

/// After a flush, other processors read the page that an address was moved to.
pub(crate) fn flush(
    session: &mut Session,
    interface: &Interface,
    cpu: &Cpu,
    room: &mut Room,
    page: u64,
) {
    if !interface.hints(REMOTE_FLUSH) {
        return skip(session, "hv-flush", "hint 2");
    }
    let Some(caller) = Caller::open(interface, room, page) else { return };
    let Some(mut moved) = Remapped::new(room) else { return };
    let forms = [Form::Mask, Form::Everybody, Form::Set, Form::FullSet];
    let forms = &forms[..if interface.hints(EXTENDED_MASKS) { 4 } else { 2 }];
    let (mut calls, mut refused, mut old, mut stale, mut last) = (0, 0, 0, 0, 0);
    for &form in forms {
        for (fast, listed) in [(false, false), (false, true), (true, false), (true, true)] {
            for peer in some_peers() {
                let index = peer.read_msr(cpu, VP_INDEX).unwrap_or(0);
                peer.load(cpu, moved.address);
                let expected = moved.swap();
                old += u64::from(peer.load(cpu, moved.address) != Some(expected));
                let address = listed.then_some(moved.address);
                let (control, words, used) = flush_words(form, 1 << (index & 63), address);
                let call = Call { control, words: &words[..used] };
                let status = caller.call(&call, fast);
                let done = if listed { REPEAT } else { 0 };
                calls += 1;
                if status != done {
                    (refused, last) = (refused + 1, status);
                }
                stale += u64::from(peer.load(cpu, moved.address) != Some(expected));
            }
        }
    }
    session.add(
        Finding::check("hv-flush", refused == 0 && stale == 0)
            .number("calls", calls)
            .number("refused", refused)
            .hex("last", last)
            .number("old_before", old)
            .number("stale", stale)
            .flag("sets", interface.hints(EXTENDED_MASKS))
            .flag("xmm", caller.xmm),
    );
}

/// The first and the last, since each flush is followed by several wake-ups.
fn some_peers() -> impl Iterator<Item = Peer> {
    let all = Peer::all();
    let last = all.clone().count().saturating_sub(1);
    all.enumerate().filter(move |(at, _)| *at == 0 || *at == last).map(|(_, peer)| peer)
}

fn ipi_words(extended: bool, mask: u64) -> (u64, [u64; 4], usize) {
    let vector = u64::from(PEER_VECTOR);
    match extended {
        false => (SEND_IPI, [vector, mask, 0, 0], 2),
        true => (SEND_IPI_EX | BANK, [vector, SPARSE, 1, mask], 4),
    }
}

/// Each addressed processor gets one interrupt, and no other does.
pub(crate) fn interrupt(
    session: &mut Session,
    interface: &Interface,
    cpu: &Cpu,
    room: &mut Room,
    page: u64,
) {
    if !interface.hints(CLUSTER_IPI) {
        return skip(session, "hv-ipi", "hint 10");
    }
    let Some(caller) = Caller::open(interface, room, page) else { return };
    let everybody = Peer::all().fold(0, |mask, peer| mask | bit(cpu, peer));
    let last = Peer::all().last().map_or(0, |peer| bit(cpu, peer));
    let (mut calls, mut refused, mut wrong) = (0, 0, 0);
    for (extended, mask) in [(false, last), (false, everybody), (true, last), (true, everybody)] {
        if mask == 0 || (extended && !interface.hints(EXTENDED_MASKS)) {
            continue;
        }
        for fast in [false, true] {
            let (control, words, used) = ipi_words(extended, mask);
            let before = Peer::all().map(Peer::interrupts).sum::<u64>();
            let call = Call { control, words: &words[..used] };
            refused += u64::from(caller.call(&call, fast) != 0);
            calls += 1;
            let expected = u64::from(mask.count_ones());
            let sum = || Peer::all().map(Peer::interrupts).sum::<u64>() - before;
            cpu.wait(TIMEOUT_MS, || sum() >= expected);
            wrong += u64::from(sum() != expected);
        }
    }
    let low = Call { control: SEND_IPI, words: &[3, last] };
    let exception = caller.call(&low, true);
    session.add(
        Finding::check("hv-ipi", refused == 0 && wrong == 0)
            .and(INVALID_INPUTS.contains(&exception))
            .number("calls", calls)
            .number("refused", refused)
            .number("wrong", wrong)
            .hex("exception", exception),
    );
}

/// Nobody is connected to this guest: messages and events to another one are refused.
pub(crate) fn connections(
    session: &mut Session,
    interface: &Interface,
    room: &mut Room,
    page: u64,
) {
    if !interface.may(SYNIC) {
        return skip(session, "hv-connections", "privilege 2");
    }
    let Some(caller) = Caller::open(interface, room, page) else { return };
    // To connection 1: a message of type 1 with 8 bytes; event 0.
    let post = Call { control: POST_MESSAGE, words: &[1, 8 << 32 | 1, 0] };
    let signal = Call { control: SIGNAL_EVENT, words: &[1, 0] };
    let (post, signal) = (caller.call(&post, false), caller.call(&signal, true));
    session.add(
        Finding::check("hv-connections", REFUSALS.contains(&post) && REFUSALS.contains(&signal))
            .hex("post", post)
            .hex("signal", signal),
    );
}

fn bit(cpu: &Cpu, peer: Peer) -> u64 {
    peer.read_msr(cpu, VP_INDEX).map_or(0, |index| 1 << (index & 63))
}
