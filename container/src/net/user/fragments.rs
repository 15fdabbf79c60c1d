//! Reassembles fragments of the guest (RFC 791, 3.2; RFC 8200, 4.5).
//!
//! Threats: fragments that overlap, repeat, have two ends, or are missing. The number of incomplete
//! packets and the size of each are bounded, and an inconsistent packet is dropped as a whole.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::packet::{Fragment, Packet};

/// The maximum number of incomplete packets.
const MAX_PACKETS: usize = 16;
/// The maximum number of fragments per packet: the longest packet in the shortest frames.
const MAX_PARTS: usize = 128;
/// The maximum time for all fragments of a packet.
const TIMEOUT: Duration = Duration::from_secs(15);
/// The maximum size of a packet, in bytes.
const MAX_PACKET: usize = 65535;

/// Source, destination, protocol and id.
type Key = (IpAddr, IpAddr, u8, u32);

#[derive(Debug)]
struct Partial {
    key: Key,
    since: Instant,
    /// Offsets and contents.
    parts: Vec<(usize, Vec<u8>)>,
    /// Total length, once the last fragment is known.
    length: Option<usize>,
}

/// Incomplete packets, the oldest first.
#[derive(Debug, Default)]
pub struct Fragments(Vec<Partial>);

impl Fragments {
    /// Takes a fragment. Returns the payload of the packet when it is complete.
    pub fn take(&mut self, packet: &Packet<'_>, part: Fragment, now: Instant) -> Option<Vec<u8>> {
        self.0.retain(|partial| now.saturating_duration_since(partial.since) < TIMEOUT);
        let key = (packet.from, packet.to, packet.protocol, part.id);
        let found = self.0.iter().position(|partial| partial.key == key);
        let at = found.unwrap_or_else(|| {
            if self.0.len() == MAX_PACKETS {
                self.0.remove(0);
            }
            self.0.push(Partial { key, since: now, parts: Vec::new(), length: None });
            self.0.len() - 1
        });
        match self.0[at].take(part, packet.payload) {
            Some(false) => None,
            Some(true) => Some(self.0.remove(at).whole()),
            None => {
                self.0.remove(at);
                None
            }
        }
    }
}

impl Partial {
    /// Takes a fragment. Returns whether the packet is complete, or nothing if it is inconsistent.
    fn take(&mut self, part: Fragment, bytes: &[u8]) -> Option<bool> {
        let end = part.offset + bytes.len();
        let odd = part.more && (bytes.is_empty() || !bytes.len().is_multiple_of(8));
        if odd || end > MAX_PACKET || self.parts.len() == MAX_PARTS {
            return None;
        }
        // Any network may duplicate a packet.
        if self.parts.iter().any(|(offset, other)| *offset == part.offset && other == bytes) {
            return Some(false);
        }
        let overlaps = |(offset, other): &(usize, Vec<u8>)| {
            *offset < end && part.offset < *offset + other.len()
        };
        if self.parts.iter().any(overlaps) {
            return None;
        }
        if !part.more && self.length.replace(end).is_some() {
            return None;
        }
        self.parts.push((part.offset, bytes.to_vec()));
        let sum: usize = self.parts.iter().map(|(_, bytes)| bytes.len()).sum();
        let last = self.parts.iter().map(|(offset, bytes)| offset + bytes.len()).max();
        let Some(length) = self.length else { return Some(false) };
        if last > Some(length) {
            return None;
        }
        Some(sum == length)
    }

    fn whole(mut self) -> Vec<u8> {
        self.parts.sort_by_key(|(offset, _)| *offset);
        self.parts.into_iter().flat_map(|(_, bytes)| bytes).collect()
    }
}

#[cfg(test)]
mod test {
    use std::net::Ipv4Addr;

    use super::*;

    fn packet(payload: &[u8]) -> Packet<'_> {
        let from = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2));
        let to = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
        Packet { from, to, protocol: 17, hops: 64, fragment: None, payload, whole: payload }
    }

    fn part(id: u32, offset: usize, more: bool) -> Fragment {
        Fragment { id, offset, more }
    }

    #[test]
    fn fragments_are_reassembled_in_any_order() {
        let (mut fragments, now) = (Fragments::default(), Instant::now());
        let all: Vec<u8> = (0..40).collect();
        assert_eq!(fragments.take(&packet(&all[32..]), part(1, 32, false), now), None);
        assert_eq!(fragments.take(&packet(&all[..16]), part(1, 0, true), now), None);
        assert_eq!(fragments.take(&packet(&all[..16]), part(1, 0, true), now), None);
        assert_eq!(fragments.take(&packet(&all[..8]), part(2, 0, true), now), None);
        let whole = fragments.take(&packet(&all[16..32]), part(1, 16, true), now);
        assert_eq!(whole, Some(all));
        assert_eq!(fragments.0.len(), 1);
    }

    #[test]
    fn invalid_fragments_are_dropped_and_memory_is_bounded() {
        let (mut fragments, now) = (Fragments::default(), Instant::now());
        let bytes = [7; 64];
        for bad in [part(1, 65528, true), part(1, 65480, false)] {
            assert_eq!(fragments.take(&packet(&bytes), bad, now), None);
            assert!(fragments.0.is_empty());
        }
        fragments.take(&packet(&bytes), part(1, 0, true), now);
        fragments.take(&packet(&bytes[..60]), part(1, 32, false), now);
        assert!(fragments.0.is_empty(), "overlapping fragments are dropped");
        fragments.take(&packet(&bytes), part(1, 64, false), now);
        fragments.take(&packet(&bytes), part(1, 128, false), now);
        assert!(fragments.0.is_empty(), "it ends once");
        for id in 0..100 {
            fragments.take(&packet(&bytes), part(id, 0, true), now);
        }
        assert_eq!(fragments.0.len(), MAX_PACKETS);
        fragments.take(&packet(&bytes), part(1000, 0, true), now + TIMEOUT);
        assert_eq!(fragments.0.len(), 1);
    }
}
