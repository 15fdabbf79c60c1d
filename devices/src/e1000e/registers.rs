//! The registers in BAR 0 (82574 datasheet, chapter 10): their offsets and bits, their values at
//! power-on, and their storage.

use serde::{Deserialize, Serialize};

pub(super) const CTRL: u32 = 0x0000;
pub(super) const STATUS: u32 = 0x0008;
pub(super) const EECD: u32 = 0x0010;
pub(super) const EERD: u32 = 0x0014;
pub(super) const CTRL_EXT: u32 = 0x0018;
pub(super) const MDIC: u32 = 0x0020;
/// The type of a VLAN tag.
pub(super) const VET: u32 = 0x0038;
pub(super) const ICR: u32 = 0x00c0;
pub(super) const ITR: u32 = 0x00c4;
pub(super) const ICS: u32 = 0x00c8;
pub(super) const IMS: u32 = 0x00d0;
pub(super) const IMC: u32 = 0x00d8;
pub(super) const EIAC: u32 = 0x00dc;
pub(super) const IAM: u32 = 0x00e0;
pub(super) const IVAR: u32 = 0x00e4;
/// The first of five.
pub(super) const EITR: u32 = 0x00e8;
pub(super) const RCTL: u32 = 0x0100;
pub(super) const TCTL: u32 = 0x0400;
const TIPG: u32 = 0x0410;
const LEDCTL: u32 = 0x0e00;
const EXTCNF_CTRL: u32 = 0x0f00;
const PBA: u32 = 0x1000;
const PBS: u32 = 0x1008;
const EEMNGCTL: u32 = 0x1010;
pub(super) const EEWR: u32 = 0x102c;
pub(super) const PSRCTL: u32 = 0x2170;
/// The first registers of a receive and of a transmit ring. Those of the second queue follow
/// [`SECOND`] bytes later.
pub(super) const RDBAL: u32 = 0x2800;
pub(super) const TDBAL: u32 = 0x3800;
pub(super) const SECOND: u32 = 0x100;
// Relative to RDBAL and TDBAL.
pub(super) const HIGH: u32 = 0x04;
pub(super) const LENGTH: u32 = 0x08;
pub(super) const HEAD: u32 = 0x10;
pub(super) const TAIL: u32 = 0x18;
pub(super) const RDT: u32 = RDBAL + TAIL;
pub(super) const TDT: u32 = TDBAL + TAIL;
const RXDCTL: u32 = 0x2828;
pub(super) const TARC: u32 = 0x3840;
/// The first and the last statistics register.
pub(super) const STATISTICS: u32 = 0x4000;
const STATISTICS_END: u32 = 0x4124;
/// The number of packets that were cut into segments.
pub(super) const TSCTC: u32 = 0x40f8;
pub(super) const RXCSUM: u32 = 0x5000;
pub(super) const RFCTL: u32 = 0x5008;
pub(super) const MTA: u32 = 0x5200;
/// The first of 16 addresses, with 8 bytes each.
pub(super) const RAL: u32 = 0x5400;
pub(super) const ADDRESSES: u32 = 16;
pub(super) const VFTA: u32 = 0x5600;
pub(super) const MRQC: u32 = 0x5818;
const MANC: u32 = 0x5820;
const FACTPS: u32 = 0x5b30;
pub(super) const SWSM: u32 = 0x5b50;
pub(super) const RETA: u32 = 0x5c00;
pub(super) const RSSRK: u32 = 0x5c80;

// CTRL
pub(super) const CTRL_FD: u32 = 1 << 0;
pub(super) const CTRL_GIO_MASTER_DISABLE: u32 = 1 << 2;
const CTRL_SLU: u32 = 1 << 6;
pub(super) const CTRL_SPEED: u32 = 3 << 8;
pub(super) const CTRL_FRCSPD: u32 = 1 << 11;
pub(super) const CTRL_FRCDPLX: u32 = 1 << 12;
pub(super) const CTRL_RST: u32 = 1 << 26;
/// Remove and insert VLAN tags.
pub(super) const CTRL_VME: u32 = 1 << 30;
pub(super) const CTRL_PHY_RST: u32 = 1 << 31;
// STATUS
pub(super) const STATUS_FD: u32 = 1 << 0;
pub(super) const STATUS_LU: u32 = 1 << 1;
const STATUS_SPEED_SHIFT: u32 = 6;
/// The speed that CTRL and STATUS encode as 2.
const GIGABIT: u32 = 2;
/// The detected speed.
const STATUS_ASDV: u32 = GIGABIT << 8;
pub(super) const STATUS_PHYRA: u32 = 1 << 10;
const STATUS_GIO_MASTER_ENABLE: u32 = 1 << 19;
// CTRL_EXT
pub(super) const CTRL_EXT_SELF_CLEARING: u32 = 1 << 12 | 1 << 13;
pub(super) const CTRL_EXT_EIAME: u32 = 1 << 24;
pub(super) const CTRL_EXT_IAME: u32 = 1 << 27;
// EECD: present, automatic read done.
pub(super) const EECD_READ_ONLY: u32 = 1 << 8 | 1 << 9 | 0xf << 11;
// RCTL
pub(super) const RCTL_EN: u32 = 1 << 1;
pub(super) const RCTL_UPE: u32 = 1 << 3;
pub(super) const RCTL_MPE: u32 = 1 << 4;
pub(super) const RCTL_LPE: u32 = 1 << 5;
pub(super) const RCTL_PACKET_SPLIT: u32 = 1 << 10;
pub(super) const RCTL_BAM: u32 = 1 << 15;
pub(super) const RCTL_VFE: u32 = 1 << 18;
pub(super) const RCTL_BSEX: u32 = 1 << 25;
pub(super) const RCTL_SECRC: u32 = 1 << 26;
// TCTL, TARC
pub(super) const TCTL_EN: u32 = 1 << 1;
pub(super) const TARC_ENABLE: u32 = 1 << 10;
// RXCSUM
pub(super) const RXCSUM_IPOFLD: u32 = 1 << 8;
pub(super) const RXCSUM_TUOFLD: u32 = 1 << 9;
pub(super) const RXCSUM_PCSD: u32 = 1 << 13;
// RFCTL
pub(super) const RFCTL_EXTEN: u32 = 1 << 15;
/// RAH: the address is valid.
pub(super) const RAH_AV: u32 = 1 << 31;

/// Bytes of the registers that exist.
const SIZE: u32 = 0xc000;

/// Ranges of registers that keep what is written, first and last offset.
const STORED: [(u32, u32); 18] = [
    // FLA, FCAL, FCAH, FCT, VET
    (0x001c, 0x001c),
    (0x0028, 0x0038),
    (EIAC, EITR + 0x10),
    (RCTL, RCTL),
    // FCTTV, TXCW, TCTL, TCTL_EXT, TIPG, AIT
    (0x0170, 0x0180),
    (TCTL, 0x0458),
    // LEDCTL, EXTCNF_CTRL, PHY_CTRL, PBA, EEMNGCTL, FLSW*
    (LEDCTL, 0x1028),
    (0x1030, 0x1054),
    // ERT, FCRTL, FCRTH, PSRCTL, RDFH to RDFPC
    (0x2008, 0x2430),
    (RDBAL, RDBAL + 0x1ff),
    (0x2c00, 0x2c08),
    // TDFH to TDFPC
    (0x3410, 0x3430),
    (TDBAL, TDBAL + 0x1ff),
    (RXCSUM, RFCTL),
    (MTA, 0x5aff),
    (0x5b00, 0x5b64),
    (RETA, 0x5fff),
    // Time stamps
    (0xb600, 0xb64c),
];

/// The words of all registers, without side effects.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Registers(Vec<u32>);

/// Registers that are not zero, as pairs of an index and a word.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct Saved(Vec<(u32, u32)>);

impl Registers {
    /// `address` is the MAC address that the NVM contains.
    pub(super) fn power_on(address: [u8; 6]) -> Self {
        let mut registers = Self(vec![0; (SIZE / 4) as usize]);
        for (offset, value) in [
            (CTRL, CTRL_FD | CTRL_SLU | GIGABIT << 8 | 1 << 18 | 1 << 20),
            (STATUS, STATUS_ASDV),
            (EECD, 1 << 8 | 1 << 9),
            (EERD, 1 << 1),
            (EEWR, 1 << 1),
            (TIPG, 8 | 8 << 10 | 6 << 20),
            (LEDCTL, 0x0006_8302),
            (EXTCNF_CTRL, 1 << 3),
            (PBA, 0x0014_0014),
            (PBS, 0x28),
            (EEMNGCTL, 1 << 31),
            (PSRCTL, 2 | 4 << 8 | 4 << 16),
            (RXDCTL, 1 << 16),
            (RXDCTL + SECOND, 1 << 16),
            (TARC, 3 | TARC_ENABLE),
            (TARC + SECOND, 3 | TARC_ENABLE),
            (RXCSUM, RXCSUM_IPOFLD | RXCSUM_TUOFLD),
            (MANC, 1 << 13),
            (FACTPS, 0x2000_0000 | 1 << 2),
            (SWSM, 1),
            (VET, 0x8100),
        ] {
            registers.set(offset, value);
        }
        let [a, b, c, d, e, f] = address;
        registers.set(RAL, u32::from_le_bytes([a, b, c, d]));
        registers.set(RAL + 4, u32::from_le_bytes([e, f, 0, 0]) | RAH_AV);
        registers
    }

    pub(super) fn get(&self, offset: u32) -> u32 {
        self.0.get((offset / 4) as usize).copied().unwrap_or(0)
    }

    pub(super) fn set(&mut self, offset: u32, value: u32) {
        if let Some(word) = self.0.get_mut((offset / 4) as usize) {
            *word = value;
        }
    }

    pub(super) fn has(&self, offset: u32, bits: u32) -> bool {
        self.get(offset) & bits != 0
    }

    /// Adds to a statistics register. It stops at its maximum.
    pub(super) fn count(&mut self, offset: u32, more: u32) {
        self.set(offset, self.get(offset).saturating_add(more));
    }

    /// Adds to two registers that count bytes with 64 bits.
    pub(super) fn count_bytes(&mut self, low: u32, more: u32) {
        let before = u64::from(self.get(low + 4)) << 32 | u64::from(self.get(low));
        let now = before.saturating_add(more.into());
        self.set(low, (now & 0xffff_ffff) as u32);
        self.set(low + 4, (now >> 32) as u32);
    }

    pub(super) fn byte(&self, table: u32, at: u32) -> u8 {
        let word = self.get(table + (at & !3)).to_le_bytes();
        word[(at % 4) as usize]
    }

    /// STATUS, with the bits that follow from other registers.
    pub(super) fn status(&self, link_up: bool) -> u32 {
        let (mut status, ctrl) = (self.get(STATUS), self.get(CTRL));
        if ctrl & CTRL_GIO_MASTER_DISABLE == 0 {
            status |= STATUS_GIO_MASTER_ENABLE;
        }
        if ctrl & CTRL_FRCDPLX == 0 || ctrl & CTRL_FD != 0 {
            status |= STATUS_FD;
        }
        let forced = ctrl & CTRL_FRCSPD != 0;
        let speed = if forced { (ctrl & CTRL_SPEED) >> 8 } else { GIGABIT };
        status |= speed << STATUS_SPEED_SHIFT;
        if link_up { status | STATUS_LU } else { status }
    }

    pub(super) fn save(&self) -> Saved {
        let words = (0..).zip(&self.0).filter(|(_, word)| **word != 0);
        Saved(words.map(|(index, word)| (index, *word)).collect())
    }

    /// Words outside of the registers are ignored.
    pub(super) fn restore(&mut self, saved: &Saved) {
        self.0.fill(0);
        for (index, word) in &saved.0 {
            if let Some(offset) = index.checked_mul(4) {
                self.set(offset, *word);
            }
        }
    }
}

/// Whether a register keeps what is written.
pub(super) fn is_stored(offset: u32) -> bool {
    STORED.iter().any(|(first, last)| (*first..=*last).contains(&offset))
}

/// Whether a register counts, and is cleared when it is read.
pub(super) fn is_statistic(offset: u32) -> bool {
    (STATISTICS..=STATISTICS_END).contains(&offset)
}

/// Translates the offsets that older controllers have for some registers (10.1.1).
pub(super) fn canonical(offset: u32) -> u32 {
    match offset {
        0x0004 => CTRL,
        0x0040..0x00c0 => offset - 0x40 + RAL,
        0x0108 => 0x2820,
        0x0110..=0x0128 => offset - 0x110 + RDBAL,
        0x0160 => 0x2168,
        0x0168 => 0x2160,
        0x0200..0x0400 => offset - 0x200 + MTA,
        0x0420..=0x0440 => offset - 0x420 + TDBAL,
        0x0600..0x0800 => offset - 0x600 + VFTA,
        _ => offset,
    }
}
