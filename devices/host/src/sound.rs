//! Sound on its way from a sound card to listeners, and from a microphone to the card.
//!
//! A frame is two signed samples of 16 bits, left and right, in little-endian order. A second has
//! [`RATE`] frames. A card plays at the pace of the host's clock and waits for nobody: all
//! listeners read one ring, and a listener that is too slow loses the oldest frames.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use anyhow::Context as _;
use rustix::fs::OFlags;

use crate::stream::output_file;

/// Frames per second.
pub const RATE: u32 = 48_000;
pub const FRAME_BYTES: usize = 4;
/// Half a second.
const RING_BYTES: usize = RATE as usize * FRAME_BYTES / 2;

/// Called whenever there are new frames. It must not block or call the hub.
pub type Wake = Arc<dyn Fn() + Send + Sync>;

/// The listeners of a machine's sound.
#[derive(Default)]
pub struct Hub(Mutex<State>);

#[derive(Default)]
struct State {
    /// Byte `n` of all that was played is at `n % RING_BYTES`. Empty while nobody listens.
    ring: Vec<u8>,
    /// Bytes that were played while somebody listened.
    end: u64,
    listeners: BTreeMap<u64, Wake>,
    next: u64,
    /// The machine has a sound card.
    card: bool,
}

impl Hub {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no listener panicked")
    }

    /// Called by sound cards when they are built.
    pub fn add_card(&self) {
        self.state().card = true;
    }

    pub fn has_card(&self) -> bool {
        self.state().card
    }

    /// Passes whole frames to all listeners.
    pub fn play(&self, frames: &[u8]) {
        let mut state = self.state();
        if state.listeners.is_empty() {
            return;
        }
        let State { ring, end, .. } = &mut *state;
        for part in frames.chunks(RING_BYTES) {
            let at = offset(*end);
            let (late, early) = part.split_at(part.len().min(RING_BYTES - at));
            ring[at..at + late.len()].copy_from_slice(late);
            ring[..early.len()].copy_from_slice(early);
            *end += part.len() as u64;
        }
        state.listeners.values().for_each(|wake| wake());
    }

    /// A listener, which hears the frames that are played from now on.
    pub fn listen(self: &Arc<Self>, wake: Wake) -> Listener {
        let mut state = self.state();
        state.ring.resize(RING_BYTES, 0);
        let number = state.next;
        state.next += 1;
        state.listeners.insert(number, wake);
        Listener { hub: self.clone(), number, at: state.end }
    }
}

/// The place of a byte in the ring.
fn offset(at: u64) -> usize {
    usize::try_from(at % RING_BYTES as u64).expect("smaller than the ring")
}

pub struct Listener {
    hub: Arc<Hub>,
    number: u64,
    /// The first byte that was not taken yet.
    at: u64,
}

impl Listener {
    /// Takes whole frames, and returns their bytes. A listener that is more than half a second
    /// late continues with the newest quarter of a second.
    pub fn take(&mut self, frames: &mut [u8]) -> usize {
        let state = self.hub.state();
        if state.end - self.at > RING_BYTES as u64 {
            self.at = state.end - RING_BYTES as u64 / 2;
        }
        let left = usize::try_from(state.end - self.at).expect("smaller than the ring");
        let count = left.min(frames.len() / FRAME_BYTES * FRAME_BYTES);
        let at = offset(self.at);
        let first = count.min(RING_BYTES - at);
        frames[..first].copy_from_slice(&state.ring[at..at + first]);
        frames[first..count].copy_from_slice(&state.ring[..count - first]);
        self.at += count as u64;
        count
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let mut state = self.hub.state();
        state.listeners.remove(&self.number);
        if state.listeners.is_empty() {
            state.ring = Vec::new();
        }
    }
}

/// Both ends of one card's sound on the host.
pub struct Ends {
    hub: Arc<Hub>,
    speaker: Option<File>,
    microphone: Option<File>,
    /// The start of a frame that the microphone has not finished.
    partial: Vec<u8>,
}

impl Ends {
    /// `speaker` is a file that gets everything that the card plays, in addition to the listeners.
    /// `microphone` is a file or a FIFO to record. Without one, there is silence.
    /// `goes_on` is that of `output_file`.
    pub fn open(
        hub: Arc<Hub>,
        speaker: Option<&Path>,
        microphone: Option<&Path>,
        goes_on: bool,
    ) -> anyhow::Result<Self> {
        let speaker = speaker
            .map(|path| output_file(path, goes_on).with_context(|| path.display().to_string()));
        let speaker = speaker.transpose()?;
        // A FIFO without another end neither blocks us now nor later.
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let microphone = microphone.map(|path| {
            let file = OpenOptions::new().read(true).custom_flags(flags).open(path);
            file.with_context(|| path.display().to_string())
        });
        let microphone = microphone.transpose()?;
        Ok(Self { hub, speaker, microphone, partial: Vec::new() })
    }

    pub fn play(&mut self, frames: &[u8]) {
        self.hub.play(frames);
        if let Some(file) = &mut self.speaker {
            // The guest cannot learn that the host's disk is full.
            file.write_all(frames).ok();
        }
    }

    /// Fills `frames`, whose end is silent if the microphone has less.
    pub fn record(&mut self, frames: &mut [u8]) {
        frames.fill(0);
        let Some(file) = &mut self.microphone else { return };
        let mut filled = self.partial.len().min(frames.len());
        frames[..filled].copy_from_slice(&self.partial[..filled]);
        self.partial.clear();
        while filled < frames.len() {
            match file.read(&mut frames[filled..]) {
                Ok(count @ 1..) => filled += count,
                _ => break,
            }
        }
        let whole = filled / FRAME_BYTES * FRAME_BYTES;
        self.partial.extend(&frames[whole..filled]);
        frames[whole..].fill(0);
    }
}

#[cfg(test)]
mod test {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    /// Frames whose number is in both samples.
    fn frames(numbers: std::ops::Range<u16>) -> Vec<u8> {
        numbers.flat_map(|it| [it, it]).flat_map(u16::to_le_bytes).collect()
    }

    fn take_all(listener: &mut Listener) -> Vec<u8> {
        let (mut all, mut some) = (Vec::new(), [0; 1000]);
        loop {
            match listener.take(&mut some) {
                0 => return all,
                count => all.extend(&some[..count]),
            }
        }
    }

    #[test]
    fn each_listener_hears_all_that_is_played_while_it_listens() {
        let (hub, woken) = (Arc::<Hub>::default(), Arc::new(AtomicU32::new(0)));
        hub.play(&frames(0..10));
        let count = woken.clone();
        let wake: Wake = Arc::new(move || {
            count.fetch_add(1, Ordering::Relaxed);
        });
        let mut early = hub.listen(wake.clone());
        let mut heard = Vec::new();
        for at in 0..60 {
            hub.play(&frames(at * 1000..at * 1000 + 1000));
            heard.extend(take_all(&mut early));
        }
        assert!(heard == frames(0..60_000), "across the end of the ring, without a gap");
        let mut late = hub.listen(wake);
        hub.play(&frames(7..9));
        assert_eq!(take_all(&mut late), frames(7..9));
        assert_eq!(woken.load(Ordering::Relaxed), 62);
    }

    #[test]
    fn a_slow_listener_loses_frames_and_memory_stays_bounded() {
        let hub = Arc::<Hub>::default();
        let mut listener = hub.listen(Arc::new(|| {}));
        hub.play(&frames(0..60_000));
        let heard = take_all(&mut listener);
        assert!(heard == frames(48_000..60_000), "{} bytes", heard.len());
        assert_eq!(hub.state().ring.capacity(), RING_BYTES);
        drop(listener);
        assert_eq!(hub.state().ring.capacity(), 0);
    }

    #[test]
    fn a_microphone_gives_whole_frames_and_then_silence() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("microphone");
        std::fs::write(&path, [1, 2, 3, 4, 5, 6]).unwrap();
        let mut ends = Ends::open(Arc::default(), None, Some(&path), false).unwrap();
        let mut heard = [9; 8];
        ends.record(&mut heard);
        assert_eq!(heard, [1, 2, 3, 4, 0, 0, 0, 0]);
        std::fs::write(&path, [1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
        ends.record(&mut heard);
        assert_eq!(heard, [5, 6, 7, 8, 0, 0, 0, 0]);
        let mut ends = Ends::open(Arc::default(), None, None, false).unwrap();
        heard.fill(9);
        ends.record(&mut heard);
        assert_eq!(heard, [0; 8]);
    }

    #[test]
    fn a_speaker_gets_everything_without_listeners() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("speaker");
        let mut ends = Ends::open(Arc::default(), Some(&path), None, false).unwrap();
        ends.play(&frames(0..3));
        ends.play(&frames(3..4));
        assert_eq!(std::fs::read(&path).unwrap(), frames(0..4));
        let error = Ends::open(Arc::default(), None, Some(&folder.path().join("none")), false);
        let error = format!("{:#}", error.err().unwrap());
        assert!(error.contains("/none: No such file"), "{error}");
    }
}
