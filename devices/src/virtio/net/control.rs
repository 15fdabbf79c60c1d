//! The control queue of a network device (VIRTIO 1.3, 5.1.6.5): the driver sets its receive
//! filters, its MAC address, the number of queue pairs and the receive offloads.
//!
//! Every command is answered with OK, even an unknown one. NetKVM sends classes that were not
//! offered, waits for the answer in a loop, and gives up on the adapter after any other answer:
//! after ERR (0.1.271 to 0.1.285), or after an answer that is not exactly one byte long (later
//! versions). Invalid commands change nothing.
//!
//! Threats: the driver chooses the length of its tables. Each table keeps up to [`MAX_TABLE`]
//! addresses. A longer table accepts every frame of its kind, as the specification allows.

use serde::{Deserialize, Serialize};

use crate::bytes::Bytes;
use host::memory::{Memory, Piece};
use host::net::read_pieces;

const MAX_TABLE: usize = 64;
/// The answer to every command.
pub(super) const OK: u8 = 0;

pub(super) type Address = [u8; 6];

/// Classes and commands, as `class << 8 | command`
const RX_PROMISC: u16 = 0x0000;
const RX_ALLMULTI: u16 = 0x0001;
const RX_ALLUNI: u16 = 0x0002;
const RX_NOMULTI: u16 = 0x0003;
const RX_NOUNI: u16 = 0x0004;
const RX_NOBCAST: u16 = 0x0005;
const MAC_TABLE_SET: u16 = 0x0100;
const MAC_ADDR_SET: u16 = 0x0101;
const VLAN_ADD: u16 = 0x0200;
const VLAN_DEL: u16 = 0x0201;
const ANNOUNCE_ACK: u16 = 0x0300;
const MQ_VQ_PAIRS_SET: u16 = 0x0400;
const GUEST_OFFLOADS_SET: u16 = 0x0500;

/// The driver's settings since the last reset.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Control {
    pub(super) filter: Filter,
    pub(super) mac: Option<Address>,
    /// The number of queue pairs that may receive frames.
    pub(super) pairs: u16,
    /// Feature bits of the enabled receive offloads. None enables all that were negotiated.
    pub(super) offloads: Option<u64>,
    /// VIRTIO_NET_S_ANNOUNCE: the driver is asked to announce itself to its network.
    pub(super) announce: bool,
}

impl Default for Control {
    fn default() -> Self {
        Self { filter: Filter::default(), mac: None, pairs: 1, offloads: None, announce: false }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Filter {
    /// Accept every frame. This is on until the driver changes it.
    promiscuous: bool,
    all_multicast: bool,
    all_unicast: bool,
    no_multicast: bool,
    no_unicast: bool,
    no_broadcast: bool,
    unicast: Table,
    multicast: Table,
    /// One bit for each VLAN that is accepted.
    vlans: Bytes<512>,
}

impl Default for Filter {
    fn default() -> Self {
        Self {
            promiscuous: true,
            all_multicast: false,
            all_unicast: false,
            no_multicast: false,
            no_unicast: false,
            no_broadcast: false,
            unicast: Table::default(),
            multicast: Table::default(),
            vlans: Bytes::default(),
        }
    }
}

/// A MAC filter table, or the fact that the driver's table was too long.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    addresses: Vec<Address>,
    overflow: bool,
}

impl Table {
    fn has(&self, address: Address) -> bool {
        self.overflow || self.addresses.contains(&address)
    }

    /// Reads a table: a count and that number of addresses. Returns it and the offset of its end.
    fn read(memory: &Memory, from: &[Piece], at: usize) -> Option<(Self, usize)> {
        let count = u32::from_le_bytes(bytes(memory, from, at)?);
        let count = usize::try_from(count).ok()?;
        let end = count.checked_mul(6)?.checked_add(at + 4)?;
        if count > MAX_TABLE {
            return Some((Self { addresses: Vec::new(), overflow: true }, end));
        }
        let address = |number: usize| bytes(memory, from, at + 4 + 6 * number);
        let addresses = (0..count).map(address).collect::<Option<_>>()?;
        Some((Self { addresses, overflow: false }, end))
    }
}

/// Returns None if the command is shorter.
fn bytes<const N: usize>(memory: &Memory, from: &[Piece], at: usize) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    let count = read_pieces(memory, from, at, &mut bytes).ok()?;
    (count == N).then_some(bytes)
}

impl Filter {
    /// Whether the driver accepts a frame that begins with these bytes. `own` is the driver's MAC
    /// address, and `by_vlan` says whether CTRL_VLAN was negotiated.
    pub(super) fn accepts(&self, frame: &[u8; 16], own: Address, by_vlan: bool) -> bool {
        if self.promiscuous {
            return true;
        }
        let [d0, d1, d2, d3, d4, d5, _, _, _, _, _, _, kind, kind_too, tag, tag_too] = *frame;
        if by_vlan && (kind, kind_too) == (0x81, 0x00) {
            let number = usize::from(u16::from_be_bytes([tag, tag_too]) & 0xfff);
            if self.vlans[number / 8] >> (number % 8) & 1 == 0 {
                return false;
            }
        }
        let to = [d0, d1, d2, d3, d4, d5];
        if to == [0xff; 6] {
            !self.no_broadcast
        } else if to[0] & 1 != 0 {
            !self.no_multicast && (self.all_multicast || self.multicast.has(to))
        } else {
            !self.no_unicast && (self.all_unicast || to == own || self.unicast.has(to))
        }
    }

    pub(super) fn is_valid(&self) -> bool {
        [&self.unicast, &self.multicast].iter().all(|table| table.addresses.len() <= MAX_TABLE)
    }
}

impl Control {
    /// Executes a command for a device with `max_pairs` queue pairs. Returns None if the command is
    /// invalid or unknown.
    pub(super) fn execute(
        &mut self,
        memory: &Memory,
        from: &[Piece],
        max_pairs: u16,
    ) -> Option<()> {
        let command = u16::from_be_bytes(bytes(memory, from, 0)?);
        let on = || bytes::<1>(memory, from, 2).map(|byte| byte[0] != 0);
        let short = || bytes(memory, from, 2).map(u16::from_le_bytes);
        let filter = &mut self.filter;
        match command {
            RX_PROMISC => filter.promiscuous = on()?,
            RX_ALLMULTI => filter.all_multicast = on()?,
            RX_ALLUNI => filter.all_unicast = on()?,
            RX_NOMULTI => filter.no_multicast = on()?,
            RX_NOUNI => filter.no_unicast = on()?,
            RX_NOBCAST => filter.no_broadcast = on()?,
            MAC_TABLE_SET => {
                let (unicast, end) = Table::read(memory, from, 2)?;
                let (multicast, _) = Table::read(memory, from, end)?;
                (filter.unicast, filter.multicast) = (unicast, multicast);
            }
            MAC_ADDR_SET => self.mac = Some(bytes(memory, from, 2)?),
            VLAN_ADD | VLAN_DEL => {
                let number = usize::from(short()?);
                let byte = filter.vlans.get_mut(number / 8)?;
                let bit = 1 << (number % 8);
                *byte = if command == VLAN_ADD { *byte | bit } else { *byte & !bit };
            }
            ANNOUNCE_ACK => self.announce = false,
            MQ_VQ_PAIRS_SET => {
                self.pairs = short().filter(|pairs| (1..=max_pairs).contains(pairs))?;
            }
            GUEST_OFFLOADS_SET => self.offloads = Some(u64::from_le_bytes(bytes(memory, from, 2)?)),
            _ => return None,
        }
        Some(())
    }
}

#[cfg(test)]
mod test {
    use std::sync::Arc;

    use host::ram::GuestMemoryMmap;
    use vm_memory::GuestAddress;

    use super::*;

    const OWN: Address = [2, 0, 0, 0, 0, 1];

    fn run(control: &mut Control, words: &[u8]) -> Option<()> {
        let ram = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 16)]).unwrap();
        let memory = Memory::new(Arc::new(ram));
        memory.write(0x100, words).unwrap();
        let length = u32::try_from(words.len()).unwrap();
        // NetKVM sends the command and its data as separate pieces.
        let cut = length.min(2);
        let from =
            [Piece { address: 0x100, length: cut }, Piece { address: 0x102, length: length - cut }];
        control.execute(&memory, &from, 4)
    }

    fn frame(to: Address, vlan: Option<u16>) -> [u8; 16] {
        let mut frame = [0; 16];
        frame[..6].copy_from_slice(&to);
        frame[12..14].copy_from_slice(&[8, 0]);
        if let Some(vlan) = vlan {
            frame[12..14].copy_from_slice(&[0x81, 0]);
            frame[14..].copy_from_slice(&vlan.to_be_bytes());
        }
        frame
    }

    #[test]
    fn the_receive_filter_follows_the_driver() {
        let mut control = Control::default();
        let (other, group, all) = ([2, 0, 0, 0, 0, 9], [1, 0, 0x5e, 0, 0, 1], [0xff; 6]);
        let seen = |control: &Control| {
            [OWN, other, group, all].map(|to| control.filter.accepts(&frame(to, None), OWN, true))
        };
        assert_eq!(seen(&control), [true; 4], "before the first command");
        run(&mut control, &[0, 0, 0]).unwrap();
        assert_eq!(seen(&control), [true, false, false, true]);
        let table = [&[1, 0, 1, 0, 0, 0][..], &other, &[1, 0, 0, 0], &group].concat();
        run(&mut control, &table).unwrap();
        assert_eq!(seen(&control), [true; 4]);
        run(&mut control, &[0, 3, 1]).unwrap();
        run(&mut control, &[0, 5, 1]).unwrap();
        assert_eq!(seen(&control), [true, true, false, false]);
        run(&mut control, &[0, 4, 1]).unwrap();
        assert_eq!(seen(&control), [false; 4]);
        for (command, value) in [(4, 0), (3, 0), (5, 0), (1, 1), (2, 1)] {
            run(&mut control, &[0, command, value]).unwrap();
        }
        run(&mut control, &[1, 0, 0, 0, 0, 0, 0, 0, 0, 0]).unwrap();
        assert_eq!(seen(&control), [true; 4], "all of both kinds");
    }

    #[test]
    fn filters_vlans_only_if_the_driver_negotiated_them() {
        let mut control = Control::default();
        run(&mut control, &[0, 0, 0]).unwrap();
        let tagged = frame(OWN, Some(0x2005));
        let wants =
            |control: &Control| [true, false].map(|it| control.filter.accepts(&tagged, OWN, it));
        assert_eq!(wants(&control), [false, true]);
        run(&mut control, &[2, 0, 5, 0]).unwrap();
        assert_eq!(wants(&control), [true, true]);
        run(&mut control, &[2, 1, 5, 0]).unwrap();
        assert_eq!(wants(&control), [false, true]);
        assert_eq!(run(&mut control, &[2, 0, 0, 0x10]), None, "there is no VLAN 4096");
    }

    #[test]
    fn a_long_table_admits_all_and_a_truncated_one_is_refused() {
        let mut control = Control::default();
        run(&mut control, &[0, 0, 0]).unwrap();
        let long = [&[1, 0, 65, 0, 0, 0][..], &[2; 65 * 6], &[0; 4]].concat();
        run(&mut control, &long).unwrap();
        assert!(control.filter.accepts(&frame([2; 6], None), OWN, false));
        assert!(!control.filter.accepts(&frame([3; 6], None), OWN, false));
        let before = control.clone();
        for short in [&long[..300], &long[..5], &[1, 0], &[1], &[], &[1, 0, 255, 255, 255, 255]] {
            assert_eq!(run(&mut control, short), None, "{} bytes", short.len());
        }
        for nonsense in
            [&[4, 0, 0, 0][..], &[4, 0, 5, 0], &[4, 1, 1], &[9, 9, 9], &[5, 0, 1], &[0, 0]]
        {
            assert_eq!(run(&mut control, nonsense), None, "{nonsense:?}");
        }
        assert_eq!(control, before);
        run(&mut control, &[4, 0, 4, 0]).unwrap();
        run(&mut control, &[1, 1, 2, 3, 4, 5, 6, 7]).unwrap();
        assert_eq!((control.pairs, control.mac), (4, Some([2, 3, 4, 5, 6, 7])));
    }
}
