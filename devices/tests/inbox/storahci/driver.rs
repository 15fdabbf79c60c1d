//! The model of storahci.sys. Names in parentheses are the functions of its published source.

use std::time::Duration;

use devices::pci::Address;
use devices::testutil::Bench;
use devices::testutil::ahci::{
    CAP, CR, DATA, Driver, FISES, FR, FRE, Fis, GHC, IS, LIST, PI, PXCI, PXCLB, PXCMD, PXFB, PXIE,
    PXIS, PXSACT, PXSCTL, PXSERR, PXSIG, PXSSTS, PXTFD, ST,
};

use crate::pci::Function;
use crate::{eventually, messages};

/// INTA of slot 31.
const GSI: u32 = 16;
const CAP2: u64 = 0x24;
const VS: u64 = 0x10;
/// GHC: AHCI enable, interrupts, reset.
const AE: u32 = 1 << 31;
const IE: u32 = 1 << 1;
const HR: u32 = 1;
/// PxCMD: spin up.
const SUD: u32 = 1 << 1;
const CLO: u32 = 1 << 3;
/// PxIS, by the groups of `AhciInterruptHandler`.
const FATAL: u32 = 1 << 30 | 1 << 29 | 1 << 28 | 1 << 27;
const OFS: u32 = 1 << 24;
const PCS: u32 = 1 << 6;
const PRCS: u32 = 1 << 22;
const NORMAL: u32 = 1 | 1 << 1 | 1 << 2 | 1 << 3 | 1 << 5;
/// PxIE as `Set_PxIE` has it.
const ENABLED: u32 = FATAL | 1 << 26 | OFS | PRCS | PCS | 0xf;
/// PxSERR: the device was detected, and the link changed.
const DIAG_X: u32 = 1 << 26;
const DIAG_N: u32 = 1 << 16;
const BUSY: u32 = 0x88;

/// The slot for commands of the driver itself. The queue has the other 31.
pub(super) const OWN: u32 = 0;
/// Pages for the driver's own commands.
pub(super) const PAGE: u64 = DATA - 0x1000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Good,
    /// The task file of a failed command: error and status.
    Failed(u32),
    /// A reset ended it. The class driver repeats it.
    Reset,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Recovery {
    Queued,
    NotQueued,
    Reset,
}

pub(super) struct Storahci<'a> {
    pub(super) driver: Driver<'a>,
    pub(super) pci: Function,
    /// The interrupt is a message, or the line.
    message: bool,
    taken: usize,
    /// Commands at the device, and those of them that are queued.
    issued: u32,
    queued: u32,
    /// Commands that a failed one had in its company, while its log is read.
    company: Option<u32>,
    pub(super) ended: Vec<(u32, End)>,
    /// Recoveries of commands that were not queued, of queued ones, and resets.
    pub(super) recoveries: (u32, u32, u32),
}

impl<'a> Storahci<'a> {
    pub(super) fn find(bench: &'a Bench, at: Address, message: bool) -> Self {
        let pci = Function::find(bench, at);
        let driver = Driver::find(bench, at);
        pci.start(bench);
        if message {
            pci.connect_message(bench, 0x61);
        }
        let taken = messages(bench).len();
        let (issued, queued, company) = (0, 0, None);
        let (ended, recoveries) = (Vec::new(), (0, 0, 0));
        Self { driver, pci, message, taken, issued, queued, company, ended, recoveries }
    }

    /// A driver whose port runs.
    pub(super) fn started(bench: &'a Bench, at: Address, message: bool) -> Self {
        let mut driver = Self::find(bench, at, message);
        driver.find_adapter();
        driver.initialize_port();
        assert!(driver.run_port(), "no device");
        driver
    }

    fn get(&self, register: u64) -> u32 {
        self.driver.get(register)
    }

    fn set(&self, register: u64, value: u32) {
        self.driver.set(register, value);
    }

    /// Waits at most this time, as the driver does.
    fn poll(limit: Duration, done: impl Fn() -> bool) -> bool {
        let step = Duration::from_millis(1);
        for _ in 0..limit.as_millis() {
            if done() {
                return true;
            }
            std::thread::sleep(step);
        }
        done()
    }

    /// `AhciHwFindAdapter`. A controller in AHCI mode is reset, which may take a second.
    pub(super) fn find_adapter(&mut self) {
        assert_eq!(self.get(VS) >> 16, 1);
        let capabilities = self.get(CAP);
        assert_eq!(self.get(CAP2), 0, "no device sleep");
        // Without these bits of CAP it manages no power of the link: PSC, SSC, SALP.
        assert_eq!(capabilities & (1 << 13 | 1 << 14 | 1 << 26), 0);
        if self.get(GHC) & AE != 0 {
            self.set(GHC, HR);
            let reset = Self::poll(Duration::from_secs(1), || self.get(GHC) & HR == 0);
            assert!(reset, "the adapter hangs");
        }
        self.set(GHC, AE);
        assert_eq!(self.get(PI), 1, "one port");
        self.set(GHC, AE | IE);
        (self.issued, self.queued, self.company) = (0, 0, None);
    }

    /// `AhciPortInitialize`. Interrupts of the port are enabled only when it runs.
    pub(super) fn initialize_port(&self) {
        for (register, address) in [(PXCLB, LIST), (PXFB, FISES)] {
            self.set(register, u32::try_from(address).unwrap());
            self.set(register + 4, 0);
        }
        self.clear_interrupts();
    }

    /// `PortClearPendingInterrupt`.
    fn clear_interrupts(&self) {
        self.set(PXSERR, u32::MAX);
        self.set(PXIS, u32::MAX);
        self.set(IS, 1);
    }

    /// `P_Running`, with its states. Returns false if no device shows within 30 ms.
    pub(super) fn run_port(&mut self) -> bool {
        let command = self.get(PXCMD);
        if command & (ST | CR | FRE | FR) == ST | CR | FRE | FR {
            return true;
        }
        self.set(PXCMD, command | SUD);
        if command & (FR | FRE) == FR || command & (CR | ST) == CR {
            self.stop_port();
        }
        assert_ne!(self.get(PXSSTS) & 0xf, 4, "the port is disabled");
        // WaitOnDET: 30 ms.
        if !Self::poll(Duration::from_millis(30), || self.get(PXSSTS) & 0xf != 0) {
            return false;
        }
        // WaitWhileDET1: a second.
        assert!(Self::poll(Duration::from_secs(1), || self.get(PXSSTS) & 0xf == 3), "the link");
        // WaitOnFRE: 50 ms, but it continues anyhow.
        self.set(PXCMD, self.get(PXCMD) | FRE);
        Self::poll(Duration::from_millis(50), || self.get(PXCMD) & FR != 0);
        // WaitOnBSYDRQ. It resets the link after a second, and gives up after a minute.
        let ready = Self::poll(Duration::from_secs(1), || {
            let busy = self.get(PXTFD) & BUSY != 0;
            if busy {
                self.set(PXSERR, DIAG_X);
            }
            !busy
        });
        assert!(ready, "the device is busy for a second");
        self.clear_interrupts();
        self.set(PXIE, ENABLED);
        assert_eq!(self.get(PXIE) | 1 << 26 | 1 << 28, ENABLED, "all but INFS and HBDS");
        self.set(PXCMD, self.get(PXCMD) | ST);
        true
    }

    /// `P_NotRunning`. Returns false if the list does not stop within 500 ms.
    pub(super) fn stop_port(&self) -> bool {
        let limit = Duration::from_millis(500);
        self.set(PXCMD, self.get(PXCMD) & !ST);
        if self.get(PXTFD) & 0x80 != 0 {
            self.set(PXCMD, self.get(PXCMD) | CLO);
        }
        if !Self::poll(limit, || self.get(PXCMD) & (CR | ST) == 0) {
            return false;
        }
        assert_eq!(self.get(PXCI), 0, "PxCI is cleared with PxCMD.ST");
        self.set(PXCMD, self.get(PXCMD) & !FRE);
        Self::poll(limit, || self.get(PXCMD) & (CR | FR | ST | FRE | CLO) == 0)
    }

    /// `AhciCOMRESET`. Returns false if no device shows within 30 ms.
    fn reset_link(&self) -> bool {
        assert_eq!(self.get(PXCMD) & ST, 0);
        let enabled = self.get(PXIE);
        self.set(PXIE, enabled & !(PRCS | PCS));
        let control = self.get(PXSCTL) & !0xf;
        self.set(PXSCTL, control | 1);
        std::thread::sleep(Duration::from_millis(1));
        self.set(PXSCTL, self.get(PXSCTL) & !0xf);
        let found = Self::poll(Duration::from_millis(30), || self.get(PXSSTS) & 0xf != 0);
        self.set(PXIE, enabled);
        self.set(PXSERR, u32::MAX);
        found
    }

    /// `AhciPortReset`: all commands end, and the driver gives up their memory. Returns false if no
    /// device shows afterwards.
    pub(super) fn reset_port(&mut self) -> bool {
        self.recoveries.2 += 1;
        self.stop_port();
        self.reset_link();
        let issued = std::mem::take(&mut self.issued) | self.company.take().unwrap_or(0);
        self.queued = 0;
        self.end(issued, End::Reset);
        self.run_port()
    }

    fn end(&mut self, slots: u32, end: End) {
        self.ended.extend((0..32).filter(|slot| slots >> slot & 1 == 1).map(|slot| (slot, end)));
    }

    pub(super) fn put(&self, slot: u32, fis: &Fis, packet: &[u8], regions: &[(u64, u32)]) {
        assert!(regions.len() <= 0x21, "NumberOfPhysicalBreaks");
        self.driver.put(slot, fis, packet, regions);
    }

    /// `ActivateQueue`: queued commands and others are never at the device together.
    pub(super) fn issue(&mut self, slots: u32, queued: bool) {
        assert!(self.issued == 0 || queued == (self.queued != 0));
        self.issued |= slots;
        if queued {
            self.queued |= slots;
            self.set(PXSACT, slots);
        }
        self.set(PXCI, slots);
    }

    /// Waits for an interrupt, and handles it.
    fn interrupted(&mut self) {
        let bench = self.driver.bench;
        if self.message {
            let taken = self.taken;
            let more = || Some(messages(bench).len()).filter(|count| *count > taken);
            self.taken = eventually("the message", more);
        } else {
            eventually("the interrupt", || bench.hypervisor.pins.is_high(GSI).then_some(()));
        }
        self.handle_interrupt();
    }

    /// `AhciHwInterrupt` and `AhciInterruptHandler`. With one message, the port is still looked up.
    fn handle_interrupt(&mut self) {
        if self.get(IS) & 1 == 0 {
            return;
        }
        let status = self.get(PXIS);
        let errors = if status & (FATAL | PCS | PRCS) == 0 { 0 } else { self.get(PXSERR) };
        let mut recovery = None;
        if status & FATAL != 0 {
            self.set(PXIS, FATAL);
            let queued = self.get(PXSACT) != 0;
            recovery = Some(if queued { Recovery::Queued } else { Recovery::NotQueued });
        }
        if status & PCS != 0 {
            self.set(PXSERR, DIAG_X);
        }
        if status & PRCS != 0 {
            self.set(PXSERR, DIAG_N);
            assert_eq!(self.get(PXSSTS) & 0xf, 3, "the device was removed");
        }
        if errors > 0 {
            self.set(PXSERR, u32::MAX);
        }
        if status & OFS != 0 {
            self.set(PXIS, OFS);
            recovery = Some(Recovery::Reset);
        }
        if status & NORMAL != 0 {
            self.set(PXIS, status & NORMAL);
        }
        if let Some(recovery) = recovery {
            self.recover(recovery);
        }
        self.set(IS, 1);
        let outstanding = self.get(PXCI) | self.get(PXSACT);
        let done = self.issued & !outstanding;
        (self.issued, self.queued) = (self.issued & outstanding, self.queued & outstanding);
        match self.company {
            Some(company) if done >> OWN & 1 == 1 => self.end_company(company),
            _ => self.end(done, End::Good),
        }
    }

    /// `AhciPortErrorRecovery`.
    fn recover(&mut self, recovery: Recovery) {
        let task_file = self.get(PXTFD);
        match recovery {
            Recovery::Reset => assert!(self.reset_port(), "no device after a reset"),
            Recovery::NotQueued => self.recover_single(task_file),
            Recovery::Queued => self.recover_queue(task_file),
        }
    }

    /// `AhciNonQueuedErrorRecovery`: one command fails, the others are issued again.
    fn recover_single(&mut self, task_file: u32) {
        self.recoveries.0 += 1;
        let (left, command) = (self.get(PXCI) & self.issued, self.get(PXCMD));
        assert!(self.stop_port());
        let finished = self.issued & !left;
        let failed = if self.issued.count_ones() == 1 {
            self.issued
        } else {
            // PxCMD.CCS names it.
            1 << (command >> 8 & 0x1f)
        };
        assert_ne!(failed & self.issued, 0, "PxCMD.CCS has the failed command");
        self.end(finished & !failed, End::Good);
        self.end(failed, End::Failed(task_file & 0xffff));
        if self.get(PXTFD) & BUSY != 0 {
            assert!(self.reset_link());
        }
        let again = left & !failed;
        self.issued = 0;
        assert!(self.run_port(), "no device after an error");
        if again != 0 {
            self.issue(again, false);
        }
    }

    /// `AhciNcqErrorRecovery`: the log of the error is read in the driver's own slot.
    fn recover_queue(&mut self, task_file: u32) {
        self.recoveries.1 += 1;
        let left = (self.get(PXCI) | self.get(PXSACT)) & self.issued;
        self.end(self.issued & !left, End::Good);
        assert!(self.stop_port());
        assert_eq!(task_file & BUSY, 0, "else the link is reset");
        assert_eq!(left >> OWN & 1, 0, "the driver's slot is free");
        (self.issued, self.queued, self.company) = (0, 0, Some(left));
        assert!(self.run_port(), "no device after an error");
        self.put(OWN, &read_log(0x10), &[], &[(PAGE, 512)]);
        self.issue(1 << OWN, false);
    }

    /// `NcqErrorRecoveryCompletion`: the log names the failed command.
    fn end_company(&mut self, company: u32) {
        self.company = None;
        let page: [u8; 512] = self.driver.data(PAGE);
        let [tag, _, status, error, ..] = page;
        assert_eq!(tag & 0x80, 0, "it was queued");
        assert_ne!(tag & 0x1f, 0, "the driver's own slot has no queued command");
        let failed = 1 << (tag & 0x1f);
        assert_ne!(failed & company, 0, "it was one of the issued commands");
        self.end(failed, End::Failed(u32::from(status) | u32::from(error) << 8));
        if company & !failed != 0 {
            self.issue(company & !failed, true);
        }
    }

    /// Handles interrupts until these commands have ended. Returns how, in this order.
    pub(super) fn finish(&mut self, slots: u32) -> Vec<(u32, End)> {
        let open = |ended: &[(u32, End)]| {
            let ended = ended.iter().fold(0_u32, |ended, (slot, _)| ended | 1_u32 << slot);
            slots & !ended != 0
        };
        while open(&self.ended) {
            self.interrupted();
        }
        std::mem::take(&mut self.ended)
    }

    /// Executes a command of the driver.
    pub(super) fn execute(&mut self, fis: &Fis, regions: &[(u64, u32)]) -> End {
        self.put(OWN, fis, &[], regions);
        self.issue(1 << OWN, false);
        self.finish(1 << OWN)[0].1
    }

    /// `IssueIdentifyCommand`: PxSIG selects the command.
    pub(super) fn identify(&mut self) -> [u16; 256] {
        let code = if self.get(PXSIG) == 0x101 { 0xec } else { 0xa1 };
        let fis = Fis { device: 0xa0, ..Fis::new(code, 0, 0) };
        assert_eq!(self.execute(&fis, &[(PAGE, 512)]), End::Good);
        let page: [u8; 512] = self.driver.data(PAGE);
        std::array::from_fn(|word| u16::from_le_bytes([page[2 * word], page[2 * word + 1]]))
    }
}

/// `IssueReadLogExtCommand`.
pub(super) fn read_log(address: u8) -> Fis {
    Fis { device: 0xe0, ..Fis::new(0x2f, address.into(), 1) }
}

/// SET FEATURES, as the driver's initial and preserved settings have it.
pub(super) fn set_feature(feature: u16, count: u16) -> Fis {
    Fis { features: feature, device: 0xa0, ..Fis::new(0xef, 0, count) }
}
