//! A model of usbxhci's transfers: chains of data TRBs that end with an Event Data TRB.

use devices::testutil::xhci::{Block, block};

use super::usbxhci::{
    BOUNDARY, CHAIN, Event, RESET_ENDPOINT, SHORT, STOPPED, SUCCESS, TRANSFER, Xhci,
};

/// TRB types, shifted to their position.
pub(crate) const NORMAL: u32 = 1 << 10;
const SETUP: u32 = 2 << 10;
const DATA: u32 = 3 << 10;
const STATUS: u32 = 4 << 10;
pub(crate) const EVENT_DATA: u32 = 7 << 10;

/// Bits of a TRB's control word.
pub(crate) const COMPLETION: u32 = 1 << 5;
const IMMEDIATE: u32 = 1 << 6;
const INWARD: u32 = 1 << 16;

/// A transfer that the driver has issued.
#[derive(Clone, Debug)]
pub(crate) struct Issued {
    pub(crate) slot: u8,
    pub(crate) endpoint: u8,
    pub(crate) cookie: u64,
    /// The addresses of its data TRBs, and their lengths.
    pub(crate) trbs: Vec<(u64, u32)>,
}

/// The end of a transfer: a completion code, and the bytes that were transferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ended {
    pub(crate) code: u32,
    pub(crate) length: u32,
}

impl Xhci {
    /// Splits a buffer as the driver must: at the boundaries, and where its memory is not
    /// contiguous.
    fn pieces(&self, at: u64, length: u32) -> Vec<(u64, u32)> {
        let (mut at, mut left, mut pieces) = (at, length, Vec::new());
        while left > 0 {
            let room = u32::try_from(BOUNDARY - at % BOUNDARY).unwrap();
            let now = left.min(self.part).min(room);
            pieces.push((at, now));
            (at, left) = (at + u64::from(now), left - now);
        }
        pieces
    }

    /// A chain of data TRBs that request no event, and an Event Data TRB that does (usb3kd: IOC 0
    /// on NORMAL, IOC 1 on EVENT_DATA; usbvfiod: never IOC on data).
    fn chain(pieces: &[(u64, u32)], (slot, first): (u8, u32), cookie: u64) -> Vec<Block> {
        let target = Self::target(slot);
        let mut left = pieces.len();
        let mut trbs: Vec<Block> = (0..)
            .zip(pieces)
            .map(|(number, (at, length))| {
                left -= 1;
                // TD Size: the packets that follow, at most 31.
                let rest = u32::try_from(left.min(31)).unwrap() << 17;
                let kind = if number == 0 { first } else { NORMAL };
                block(*at, length | rest | target, kind | CHAIN)
            })
            .collect();
        trbs.push(block(cookie, target, EVENT_DATA | COMPLETION));
        trbs
    }

    /// Puts a bulk or interrupt transfer into its ring, and rings its doorbell.
    pub(crate) fn issue(&mut self, to: (u8, u8), buffer: u64, length: u32) -> Issued {
        let ((slot, endpoint), cookie) = (to, self.new_cookie());
        let pieces = self.pieces(buffer, length);
        let trbs = Self::chain(&pieces, (slot, NORMAL), cookie);
        let at = self.push(slot, endpoint, &trbs);
        self.ring_doorbell(slot, endpoint);
        let trbs = at.into_iter().zip(pieces.iter().map(|it| it.1)).collect();
        Issued { slot, endpoint, cookie, trbs }
    }

    /// Waits for the next event of an endpoint, which must be that of this transfer: with its
    /// cookie, or with the address of one of its TRBs if it failed.
    pub(crate) fn finish(&mut self, issued: &Issued) -> Ended {
        let Issued { slot, endpoint, .. } = *issued;
        let fits =
            |it: Event| it.kind() == TRANSFER && (it.slot(), it.endpoint()) == (slot, endpoint);
        let event = self.wait_event(&format!("of {issued:x?}"), fits);
        let code = event.code();
        if event.has_cookie() {
            assert_eq!(event.pointer(), issued.cookie, "the cookie of another transfer");
            assert!(matches!(code, SUCCESS | SHORT), "code {code} with a cookie");
            return Ended { code, length: event.length() };
        }
        assert!(!matches!(code, SUCCESS | SHORT), "no event was requested for {event:x?}");
        let failed = issued.trbs.iter().position(|it| it.0 == event.pointer());
        let failed = failed.unwrap_or_else(|| panic!("a TRB of another transfer: {event:x?}"));
        let before: u32 = issued.trbs[..=failed].iter().map(|it| it.1).sum();
        Ended { code, length: before - event.length() }
    }

    /// Performs a control transfer. Returns the number of bytes, or the code.
    pub(crate) fn control(
        &mut self,
        slot: u8,
        setup: [u8; 8],
        data: &mut [u8],
    ) -> Result<usize, u32> {
        let mut moved = 0;
        for stage in self.issue_control(slot, setup, data) {
            let Ended { code, length } = self.finish(&stage.0);
            if !matches!(code, SUCCESS | SHORT) {
                self.recover(slot, 1, code);
                return Err(code);
            }
            moved += usize::try_from(length).unwrap();
            let received = self.read(stage.1, data.len());
            data.copy_from_slice(&received);
        }
        Ok(moved)
    }

    /// Issues a control transfer (usbvfiod: Setup; Data and Event Data; Status and Event Data).
    /// Returns its stages, each with the buffer.
    pub(crate) fn issue_control(
        &mut self,
        slot: u8,
        setup: [u8; 8],
        data: &[u8],
    ) -> Vec<(Issued, u64)> {
        let length = u32::try_from(data.len()).unwrap();
        assert_eq!(u32::from(u16::from_le_bytes([setup[6], setup[7]])), length);
        let (inward, target) = (u32::from(setup[0] >> 7), Self::target(slot));
        let buffer = self.allocate(u64::from(length.max(1)));
        self.write(buffer, data);
        // TRT: no data, to the device, from the device.
        let kind = if length == 0 { 0 } else { 2 + inward } << 16;
        let setup = block(u64::from_le_bytes(setup), 8 | target, SETUP | IMMEDIATE | kind);
        let setup = self.push(slot, 1, &[setup])[0];
        let mut stages = Vec::new();
        if length > 0 {
            stages.push((self.pieces(buffer, length), DATA | (inward * INWARD)));
        }
        let back = if inward == 1 && length > 0 { 0 } else { INWARD };
        stages.push((vec![(0, 0)], STATUS | back));
        let mut issued = Vec::new();
        for (pieces, first) in stages {
            let cookie = self.new_cookie();
            let at = self.push(slot, 1, &Self::chain(&pieces, (slot, first), cookie));
            let trbs = at.into_iter().zip(pieces.iter().map(|it| it.1));
            // A device that is gone fails at the setup stage.
            let trbs = [(setup, 0)].into_iter().chain(trbs).collect();
            issued.push((Issued { slot, endpoint: 1, cookie, trbs }, buffer));
        }
        self.ring_doorbell(slot, 1);
        issued
    }

    /// Makes a halted endpoint usable again (UCX, EVT_UCX_ENDPOINT_RESET; spec, 4.6.8 and 4.6.10).
    pub(crate) fn recover(&mut self, slot: u8, endpoint: u8, code: u32) {
        if code != STOPPED {
            assert_eq!(self.state(slot, endpoint), 2, "halted");
            assert_eq!(self.endpoint_command(RESET_ENDPOINT, slot, endpoint), SUCCESS);
        }
        assert_eq!(self.state(slot, endpoint), 3, "stopped");
        assert_eq!(self.set_dequeue(slot, endpoint), SUCCESS);
    }
}
