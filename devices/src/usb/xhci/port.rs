//! A port of the root hub (xHCI 4.19, 5.4.8).

use serde::{Deserialize, Serialize};

use crate::usb::Speed;

/// PORTSC.
const CONNECTED: u32 = 1 << 0;
const ENABLED: u32 = 1 << 1;
const RESET: u32 = 1 << 4;
const LINK: u32 = 0xf << 5;
const POWER: u32 = 1 << 9;
const SPEED: u32 = 0xf << 10;
/// PIC: the indicator lights, which are only stored.
const INDICATORS: u32 = 3 << 14;
const LINK_STROBE: u32 = 1 << 16;
const CONNECT_CHANGE: u32 = 1 << 17;
const WARM_RESET_CHANGE: u32 = 1 << 19;
const RESET_CHANGE: u32 = 1 << 21;
const LINK_CHANGE: u32 = 1 << 22;
/// CSC to CEC.
const CHANGES: u32 = 0x7f << 17;
/// WCE, WDE, WOE.
const WAKE: u32 = 7 << 25;
const WARM_RESET: u32 = 1 << 31;
/// PORTPMSC: L1 Status of USB 2, and the reserved bits of both.
const USB2_READ_ONLY: u32 = 0x0ffe_0007;
const USB3_READ_ONLY: u32 = 0xfffe_0000;

/// Port link states (PLS).
const U0: u32 = 0;
const U3: u32 = 3;
const DISABLED: u32 = 4;
const RX_DETECT: u32 = 5;
const POLLING: u32 = 7;
const RESUME: u32 = 15;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Port {
    portsc: u32,
    /// PORTPMSC and PORTHLPMC, which are only stored: links save no power.
    power: [u32; 2],
    /// A pending reset for the controller's thread, and whether it is warm.
    reset: Option<bool>,
    /// A change was not reported to the guest yet.
    news: bool,
}

impl Default for Port {
    fn default() -> Self {
        Self { portsc: POWER | RX_DETECT << 5, power: [0; 2], reset: None, news: false }
    }
}

impl Port {
    pub(super) fn read(&self, offset: u64) -> u32 {
        match offset {
            // A disabled port does not report the speed of its device, which it keeps.
            0 if self.portsc & CONNECTED == 0 => self.portsc & !SPEED,
            0 => self.portsc,
            4 => self.power[0],
            0xc => self.power[1],
            // PORTLI: no errors.
            _ => 0,
        }
    }

    /// Returns true if the controller's thread has something to do.
    pub(super) fn write(&mut self, offset: u64, value: u32, usb3: bool) -> bool {
        match offset {
            0 => self.control(value, usb3),
            4 => self.power[0] = value & !if usb3 { USB3_READ_ONLY } else { USB2_READ_ONLY },
            0xc => self.power[1] = value,
            _ => {}
        }
        self.reset.is_some() || self.news
    }

    fn control(&mut self, value: u32, usb3: bool) {
        self.portsc &= !(value & CHANGES);
        self.portsc = self.portsc & !(INDICATORS | WAKE) | value & (INDICATORS | WAKE);
        if value & RESET != 0 || usb3 && value & WARM_RESET != 0 {
            self.portsc |= RESET;
            self.reset = Some(value & WARM_RESET != 0);
            return;
        }
        if value & ENABLED != 0 && self.portsc & ENABLED != 0 {
            if usb3 {
                self.disable();
            } else {
                self.portsc &= !ENABLED;
                self.set_link(POLLING);
            }
        } else if value & LINK_STROBE != 0 {
            self.request_link(value >> 5 & 0xf, usb3);
        }
    }

    fn request_link(&mut self, to: u32, usb3: bool) {
        let from = self.portsc >> 5 & 0xf;
        let enabled = self.portsc & ENABLED != 0;
        match to {
            U0 if enabled && from != U0 => {
                self.set_link(U0);
                self.changed(LINK_CHANGE);
            }
            U3 if enabled && from < U3 => self.set_link(U3),
            RESUME if enabled && from == U3 => self.set_link(RESUME),
            DISABLED if usb3 => self.disable(),
            RX_DETECT if usb3 && from == DISABLED => {
                self.set_link(RX_DETECT);
                self.detect(usb3);
            }
            _ => {}
        }
    }

    /// Disables a USB 3 port (4.19.1.2). It detects no device until a reset, or RxDetect is set.
    fn disable(&mut self) {
        let connected = self.portsc & CONNECTED != 0;
        self.portsc &= !(ENABLED | CONNECTED);
        self.set_link(DISABLED);
        if connected {
            self.changed(CONNECT_CHANGE);
        }
    }

    /// Connects the device that is plugged in, whose speed stays in the register.
    fn detect(&mut self, usb3: bool) {
        if self.portsc & CONNECTED == 0 && self.portsc & SPEED != 0 {
            self.portsc |= CONNECTED;
            self.changed(CONNECT_CHANGE);
        }
        self.settle(usb3);
    }

    fn set_link(&mut self, state: u32) {
        self.portsc = self.portsc & !LINK | state << 5;
    }

    fn changed(&mut self, bits: u32) {
        self.news |= self.portsc & bits != bits;
        self.portsc |= bits;
    }

    /// Sets the link state after a device was detected, or removed. USB 3 links train at once, USB
    /// 2 links wait for a reset.
    fn settle(&mut self, usb3: bool) {
        self.portsc &= !ENABLED;
        match (self.portsc & CONNECTED != 0, usb3) {
            (false, _) => self.set_link(RX_DETECT),
            (true, false) => self.set_link(POLLING),
            (true, true) => {
                self.portsc |= ENABLED;
                self.set_link(U0);
            }
        }
    }

    /// Called when a device is plugged in (with its speed) or pulled.
    pub(super) fn connect(&mut self, speed: Option<Speed>, usb3: bool) {
        self.portsc &= !(CONNECTED | SPEED);
        self.portsc |= speed.map_or(0, |it| it as u32) << 10;
        if usb3 && self.portsc & LINK == DISABLED << 5 {
            return;
        }
        // Also for a device that another one replaces at once.
        self.portsc |= if speed.is_some() { CONNECTED } else { 0 };
        self.settle(usb3);
        self.changed(CONNECT_CHANGE);
    }

    /// Whether a device is plugged in and was reset.
    pub(super) fn is_enabled(&self) -> bool {
        self.portsc & ENABLED != 0
    }

    pub(super) fn wants_reset(&self) -> bool {
        self.reset.is_some()
    }

    pub(super) fn end_reset(&mut self, usb3: bool) {
        let warm = self.reset.take().unwrap_or(false);
        self.portsc &= !RESET;
        self.detect(usb3);
        if self.portsc & CONNECTED != 0 {
            self.portsc |= ENABLED;
            self.set_link(U0);
        }
        self.changed(RESET_CHANGE | if warm { WARM_RESET_CHANGE } else { 0 });
    }

    /// Marks earlier changes as not reported. Called when the controller begins to run.
    pub(super) fn announce(&mut self) {
        self.news |= self.portsc & CHANGES != 0;
    }

    /// Whether a change must be reported to the guest. Clears this mark.
    pub(super) fn take_unreported(&mut self) -> bool {
        std::mem::take(&mut self.news)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn connected(speed: Speed, usb3: bool) -> Port {
        let mut port = Port::default();
        port.connect(Some(speed), usb3);
        assert!(port.take_unreported());
        port
    }

    #[test]
    fn usb_2_is_enabled_by_a_reset_and_usb_3_at_once() {
        let mut port = connected(Speed::High, false);
        assert_eq!(port.read(0), POWER | CONNECTED | CONNECT_CHANGE | POLLING << 5 | 3 << 10);
        port.write(0, CONNECT_CHANGE | POWER, false);
        assert!(port.write(0, RESET | POWER, false));
        assert_eq!(port.read(0), POWER | CONNECTED | RESET | POLLING << 5 | 3 << 10);
        port.end_reset(false);
        assert_eq!(port.read(0), POWER | CONNECTED | ENABLED | RESET_CHANGE | 3 << 10);
        let mut port = connected(Speed::Super, true);
        assert_eq!(port.read(0), POWER | CONNECTED | ENABLED | CONNECT_CHANGE | 4 << 10);
        port.write(0, WARM_RESET | POWER, true);
        port.end_reset(true);
        assert_eq!(port.read(0) & CHANGES, CONNECT_CHANGE | RESET_CHANGE | WARM_RESET_CHANGE);
    }

    #[test]
    fn a_link_suspends_and_resumes_with_a_change() {
        let mut port = connected(Speed::High, false);
        port.write(0, RESET, false);
        port.end_reset(false);
        let link = |port: &mut Port, state: u32| {
            port.write(0, CHANGES | LINK_STROBE | state << 5, false);
            (port.read(0) >> 5 & 0xf, port.read(0) & CHANGES)
        };
        assert_eq!(link(&mut port, RESUME), (U0, 0), "not asleep");
        assert_eq!(link(&mut port, U3), (U3, 0));
        assert_eq!(link(&mut port, RESUME), (RESUME, 0));
        assert_eq!(link(&mut port, U0), (U0, LINK_CHANGE));
        port.write(0, ENABLED, false);
        assert_eq!(link(&mut port, U3), (POLLING, 0), "the port is disabled");
        port.connect(None, false);
        assert_eq!(port.read(0), POWER | RX_DETECT << 5 | CONNECT_CHANGE);
    }

    #[test]
    fn a_usb_3_port_is_disabled_and_detects_its_device_again() {
        let mut port = connected(Speed::Super, true);
        port.write(0, LINK_STROBE | DISABLED << 5, true);
        assert_eq!(port.read(0) & (CONNECTED | ENABLED | LINK), DISABLED << 5);
        port.connect(None, true);
        port.connect(Some(Speed::Super), true);
        assert_eq!(port.read(0) & (CONNECTED | ENABLED | LINK), DISABLED << 5, "not noticed");
        port.write(0, CONNECT_CHANGE, true);
        assert!(port.write(0, LINK_STROBE | RX_DETECT << 5, true));
        assert!(port.is_enabled() && port.read(0) & CONNECT_CHANGE != 0);
        port.write(0, LINK_STROBE | DISABLED << 5, true);
        port.write(0, WARM_RESET, true);
        port.end_reset(true);
        assert!(port.is_enabled(), "a reset detects the device too");
    }

    #[test]
    fn read_only_bits_of_power_management_stay_zero() {
        let mut port = Port::default();
        for (usb3, kept) in [(false, 0xf001_fff8), (true, 0x1_ffff)] {
            port.write(4, u32::MAX, usb3);
            assert_eq!(port.read(4), kept);
        }
    }
}
