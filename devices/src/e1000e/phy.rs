//! The PHY behind MDIC (82574 datasheet, 10.2.2.7 and 10.3): a gigabit transceiver whose link
//! follows the cable. Negotiation ends at once.

use serde::{Deserialize, Serialize};

const PAGES: usize = 7;
const REGISTERS: usize = 32;

// Registers on every page.
const CONTROL: usize = 0;
const STATUS: usize = 1;
const PAGE: usize = 22;
const BM_PAGE: usize = 31;
/// Registers above this, except the page, differ between pages.
const LAST_COMMON: usize = 15;
/// Copper status 1, on page 0.
const COPPER_STATUS: usize = 17;

// CONTROL
const RESET: u16 = 1 << 15;
const RESTART: u16 = 1 << 9;
// STATUS
const LINK: u16 = 1 << 2;
const NEGOTIATED: u16 = 1 << 5;
// COPPER_STATUS: link, resolved, global link.
const COPPER_LINK: u16 = 1 << 10 | 1 << 11 | 1 << 3;

/// Values at power-on: page, register, value. The identity is that of the 82574's own PHY.
const POWER_ON: [(usize, usize, u16); 17] = [
    (0, CONTROL, 0x1140),
    (0, STATUS, 0x7949),
    (0, 2, 0x0141),
    (0, 3, 0x0cb1),
    (0, 4, 0x0de1),
    (0, 5, 0x7de0),
    (0, 6, 0x0004),
    (0, 7, 0x2001),
    (0, 9, 0x0f00),
    (0, 10, 0x3c00),
    (0, 15, 0x3000),
    (0, 16, 0x3360),
    (0, COPPER_STATUS, 0xa000),
    (2, 16, 0x0088),
    (2, 21, 0x1046),
    (3, 18, 0x4005),
    (5, 20, 0x0000),
];

/// Fields of MDIC.
const ADDRESS_SHIFT: u32 = 21;
const REGISTER_SHIFT: u32 = 16;
const WRITE: u32 = 1 << 26;
const READ: u32 = 1 << 27;
const READY: u32 = 1 << 28;
const INTERRUPT: u32 = 1 << 29;
const ERROR: u32 = 1 << 30;
/// The address of the PHY.
const OURS: u32 = 1;

/// The effects of a command in MDIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Done {
    /// The register's new value.
    pub(super) mdic: u32,
    pub(super) interrupt: bool,
    /// The driver started negotiation.
    pub(super) negotiated: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct Phy(Vec<u16>);

impl Default for Phy {
    fn default() -> Self {
        let mut registers = vec![0; PAGES * REGISTERS];
        for (page, register, value) in POWER_ON {
            registers[page * REGISTERS + register] = value;
        }
        Self(registers)
    }
}

impl Phy {
    pub(super) fn is_valid(&self) -> bool {
        self.0.len() == PAGES * REGISTERS
    }

    /// The index of a register on the current page.
    fn index(&self, register: usize) -> usize {
        let common = register <= LAST_COMMON || [PAGE, BM_PAGE].contains(&register);
        let page = if common { 0 } else { usize::from(self.0[PAGE]) };
        // Pages that do not exist are page 0.
        if page < PAGES { page * REGISTERS + register } else { register }
    }

    fn read(&self, register: usize, link_up: bool) -> u16 {
        let index = self.index(register);
        let link = match index {
            STATUS => LINK | NEGOTIATED,
            COPPER_STATUS => COPPER_LINK,
            _ => 0,
        };
        self.0[index] | if link_up { link } else { 0 }
    }

    /// Returns true if negotiation was started.
    fn write(&mut self, register: usize, value: u16) -> bool {
        let index = self.index(register);
        match index {
            CONTROL if value & RESET != 0 => *self = Self::default(),
            CONTROL => self.0[CONTROL] = value & !RESTART,
            // Status and identity.
            STATUS..=3 | COPPER_STATUS => {}
            _ => self.0[index] = value,
        }
        index == CONTROL && value & (RESET | RESTART) != 0
    }

    pub(super) fn execute(&mut self, command: u32, link_up: bool) -> Done {
        let register = (command >> REGISTER_SHIFT & 0x1f) as usize;
        let mut done = Done {
            mdic: command & !(ERROR | READY) | READY,
            interrupt: command & INTERRUPT != 0,
            negotiated: false,
        };
        if command >> ADDRESS_SHIFT & 0x1f != OURS {
            done.mdic |= ERROR;
        } else if command & READ != 0 {
            done.mdic = done.mdic & !0xffff | u32::from(self.read(register, link_up));
        } else if command & WRITE != 0 {
            done.negotiated = self.write(register, (command & 0xffff) as u16);
        }
        done
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn read(phy: &mut Phy, register: u32, link_up: bool) -> u32 {
        let done = phy.execute(READ | OURS << 21 | register << 16, link_up);
        assert_eq!(done.mdic & (READY | ERROR), READY);
        done.mdic & 0xffff
    }

    #[test]
    fn has_an_identity_and_the_state_of_the_link() {
        let mut phy = Phy::default();
        assert_eq!([2, 3].map(|it| read(&mut phy, it, true)), [0x0141, 0x0cb1]);
        assert_eq!(read(&mut phy, 1, true) & 0x24, 0x24);
        assert_eq!(read(&mut phy, 1, false) & 0x24, 0);
        assert_eq!(read(&mut phy, 17, true) & 0x0c00, 0x0c00);
        let other = phy.execute(READ | 2 << 21 | 2 << 16, true);
        assert_ne!(other.mdic & ERROR, 0, "there is one PHY");
    }

    #[test]
    fn pages_are_separate_and_a_reset_forgets_them() {
        let mut phy = Phy::default();
        let write = |phy: &mut Phy, register: u32, value: u32| {
            phy.execute(WRITE | OURS << 21 | register << 16 | value, true).negotiated
        };
        assert!(!write(&mut phy, 22, 2));
        write(&mut phy, 16, 0x1234);
        write(&mut phy, 22, 0xffff);
        assert_eq!(read(&mut phy, 16, true), 0x3360, "a page that does not exist");
        write(&mut phy, 22, 2);
        assert_eq!(read(&mut phy, 16, true), 0x1234);
        write(&mut phy, 2, 7);
        assert!(write(&mut phy, 0, 0x1340), "restarts negotiation");
        assert_eq!(read(&mut phy, 0, true), 0x1140);
        assert!(write(&mut phy, 0, 0x8000));
        assert_eq!(phy, Phy::default());
    }
}
