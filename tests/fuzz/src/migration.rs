//! The end of a migration at which a machine arrives, with arbitrary messages about its memory.

use std::sync::Arc;

use host::ram::{GuestMemoryMmap, PAGE};
use host::testutil::noise::Noise;
use vm_memory::GuestAddress;
use vmm::migration::parts::Parts;
use vmm::migration::stream::{Message, Place, Reader, Writer};

/// The lengths of the parts: two of RAM, and the memory of a device.
const PARTS: [usize; 3] = [64 * PAGE, 16 * PAGE, 8 * PAGE];

pub(crate) fn run(data: &[u8]) {
    let ranges = [(GuestAddress(0), PARTS[0]), (GuestAddress(1 << 32), PARTS[1])];
    let ram = GuestMemoryMmap::from_ranges(&ranges).expect("memory");
    let mut parts = Parts::new(Arc::new(ram), &PARTS.map(|it| it as u64)).expect("parts");
    let mut reader = Reader::new(data);
    while let Ok(message) = reader.receive() {
        match message {
            Message::Pages { place, bytes } => {
                parts.write(place, bytes).ok();
            }
            Message::Zeros { place, length } => {
                parts.clear(place, length).ok();
            }
            _ => {}
        }
    }
    let pages: usize = parts.received.devices.iter().map(|it| it.len()).sum();
    assert!(pages <= PARTS[2] / PAGE, "{pages} pages of a device");
}

/// Messages with a right checksum, most of which are within memory.
pub(crate) fn make(noise: &mut Noise) -> Vec<u8> {
    let mut data = Vec::new();
    let mut writer = Writer::new(&mut data).expect("a vector takes everything");
    for _ in 0..noise.below(12) {
        let part = noise.choose(&[0, 1, 2, 2, 3, u32::MAX]);
        let offset = noise.choose(&[0, 1, 7, 15, 63, u64::MAX / PAGE as u64]) * PAGE as u64;
        let place = Place { part, offset };
        let count = noise.choose(&[0, 1, 2, 9]);
        let bytes = vec![noise.choose(&[0, 7]); count * PAGE];
        let message = match noise.below(8) {
            0..4 => Message::Pages { place, bytes: &bytes },
            4..6 => Message::Zeros { place, length: bytes.len() as u64 },
            6 => Message::Sync,
            _ => Message::State(b"{}"),
        };
        writer.send(&message).expect("a vector takes everything");
    }
    // Sometimes damaged.
    if noise.below(3) == 0 && !data.is_empty() {
        let at = usize::try_from(noise.below(data.len() as u64)).expect("a length");
        data[at] ^= noise.choose(&[1, 0x80]);
    }
    data
}
