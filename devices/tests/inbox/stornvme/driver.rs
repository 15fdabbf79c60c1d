//! The model of stornvme.sys: its queues, its start, its transfers, and its reset.

use std::sync::Arc;

use devices::device::Kind;
use devices::nvme;
use devices::pci::Address;
use devices::testutil::Bench;
use devices::testutil::image::{Double, DoubleState};
use host::disk;

use crate::pci::Function;
use crate::{eventually, messages};

const AT: Address = Address::new(4, 0);
const BAR0: u64 = 0xc000_0000;
const BAR2: u64 = 0xd000_0000;
/// INTA of slot 4.
pub(super) const GSI: u32 = 20;
const RAM: usize = 64 << 20;
pub(super) const DISK: u64 = 16 << 20;

/// Registers.
const CAP: u64 = 0x00;
const VS: u64 = 0x08;
pub(super) const INTMS: u64 = 0x0c;
pub(super) const INTMC: u64 = 0x10;
pub(super) const CC: u64 = 0x14;
pub(super) const CSTS: u64 = 0x1c;
const AQA: u64 = 0x24;
const ASQ: u64 = 0x28;
const ACQ: u64 = 0x30;
const DOORBELLS: u64 = 0x1000;
/// CC: entries of 64 and 16 bytes, pages of 4 KiB, enabled.
pub(super) const ENABLED: u32 = 0x0046_0001;

/// Entries of the admin queues, as in the trace of rick-heig/eNVMe issue 4.
const ADMIN_ENTRIES: u32 = 256;
const ENTRIES: u32 = 256;

/// Guest addresses: queues, buffers of admin commands, PRP lists, data.
const QUEUES: u64 = 0x10_0000;
const QUEUE_SIZE: u64 = 0x1_0000;
pub(super) const PAGE: u64 = 0x8_0000;
const LISTS: u64 = 0xa0_0000;
pub(super) const DATA: u64 = 0x100_0000;

pub(super) type Dwords = [u32; 16];

pub(super) fn command(opcode: u8, nsid: u32, values: &[(usize, u32)]) -> Dwords {
    let mut dwords = [0; 16];
    (dwords[0], dwords[1]) = (opcode.into(), nsid);
    for (at, value) in values {
        dwords[*at] = *value;
    }
    dwords
}

fn low(value: u64) -> u32 {
    u32::try_from(value & 0xffff_ffff).unwrap()
}

pub(super) fn with_data(mut dwords: Dwords, one: u64, two: u64) -> Dwords {
    dwords[6..10].copy_from_slice(&[low(one), low(one >> 32), low(two), low(two >> 32)]);
    dwords
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Done {
    pub(super) result: u32,
    pub(super) queue: u16,
    pub(super) id: u16,
    pub(super) status: u16,
}

impl Done {
    /// Status code and its type.
    pub(super) fn code(self) -> u16 {
        self.status & 0x7ff
    }
}

#[derive(Clone, Copy)]
struct Ring {
    id: u16,
    at: u64,
    size: u32,
    index: u32,
    phase: bool,
}

/// The driver of a controller, on a machine with this number of processors.
pub(super) struct Stornvme {
    pub(super) bench: Bench,
    pub(super) disk: Arc<DoubleState>,
    pub(super) pci: Function,
    processors: u16,
    /// Vectors of MSI-X. With 0, the driver uses the interrupt line.
    pub(super) vectors: u16,
    submissions: Vec<Ring>,
    completions: Vec<Ring>,
    next: u16,
}

impl Stornvme {
    pub(super) fn new(processors: u16, vectors: u16) -> Self {
        let mut bench = Bench::new(RAM);
        let (image, disk) = Double::over(disk::memory(DISK));
        let queues = Some(processors);
        let config = disk::Config { slot: Some(AT), queues, ..disk::Config::new("disk") };
        let attach =
            |grants: &mut dyn devices::grants::Grants| nvme::Config(config).attach(image, grants);
        bench.board.add("nvme", attach).unwrap();
        bench.board.run(Vec::new()).unwrap();
        let pci = Function::find(&bench, AT);
        pci.place(&bench, 0, u32::try_from(BAR0).unwrap());
        pci.place(&bench, 2, u32::try_from(BAR2).unwrap());
        pci.start(&bench);
        let (submissions, completions) = (Vec::new(), Vec::new());
        let driver =
            Self { bench, disk, pci, processors, vectors, submissions, completions, next: 0 };
        if vectors > 0 {
            driver.pci.connect_vectors(&driver.bench, BAR2, vectors.into());
        }
        driver
    }

    /// A driver that has started its controller.
    pub(super) fn started(processors: u16) -> Self {
        let mut driver = Self::new(processors, processors + 1);
        driver.start();
        driver
    }

    pub(super) fn get(&self, register: u64) -> u32 {
        u32::from_le_bytes(self.bench.read(Kind::Memory, BAR0 + register))
    }

    pub(super) fn set(&self, register: u64, value: u32) {
        self.bench.write(Kind::Memory, BAR0 + register, &value.to_le_bytes());
    }

    fn set_wide(&self, register: u64, value: u64) {
        self.bench.write(Kind::Memory, BAR0 + register, &value.to_le_bytes());
    }

    pub(super) fn wait(event: &str, done: impl Fn() -> bool) {
        eventually(event, || done().then_some(()));
    }

    /// Starts the controller (NVMe 1.4, 7.6.1), and the I/O queues.
    pub(super) fn start(&mut self) {
        self.reset();
        self.enable();
        // Windows Server 2025 compares ASQ with its own value after the first Identify, and gives
        // up if it differs (oxidecomputer/propolis pull request 1199).
        let controller = self.identify(1, 0);
        assert_eq!(controller[111], 1, "an I/O controller");
        let asq: [u8; 8] = self.bench.read(Kind::Memory, BAR0 + ASQ);
        assert_eq!(u64::from_le_bytes(asq), QUEUES);
        assert_eq!(self.get(AQA), (ADMIN_ENTRIES - 1) * 0x1_0001);
        let most = u32::from(self.processors - 1) * 0x1_0001;
        let queues = self.admin(command(0x09, 0, &[(10, 0x07), (11, most)]));
        assert_eq!(queues.status, 0);
        assert!(queues.result & 0xffff >= most & 0xffff, "a queue for each processor");
        self.create_queues();
    }

    /// CC.EN is cleared first: firmware may have left the controller enabled. The limit is CAP.TO.
    pub(super) fn reset(&mut self) {
        let cc = self.get(CC);
        self.set(CC, cc & !1);
        Self::wait("the end of the reset", || self.get(CSTS) & 1 == 0);
        (self.submissions, self.completions) = (Vec::new(), Vec::new());
    }

    pub(super) fn enable(&mut self) {
        // Conjecture: the width of these reads. Both widths must read the same.
        let wide = u64::from_le_bytes(self.bench.read(Kind::Memory, BAR0 + CAP));
        assert_eq!(wide, u64::from(self.get(CAP)) | u64::from(self.get(CAP + 4)) << 32);
        assert!(wide >> 24 & 0xff >= 2, "CAP.TO: at least a second");
        // Doorbell strides are not supported by stornvme (Microsoft: stornvme-feature-support).
        assert_eq!((wide >> 32 & 0xf, wide >> 37 & 1), (0, 1), "no stride, the NVM command set");
        assert!(u32::try_from(wide & 0xffff).unwrap() + 1 >= ENTRIES);
        assert!(self.get(VS) >= 0x0001_0000);
        let (sq, cq) = (QUEUES, QUEUES + QUEUE_SIZE);
        self.fill(cq, &[0; 16 * ADMIN_ENTRIES as usize]);
        self.set(AQA, (ADMIN_ENTRIES - 1) * 0x1_0001);
        self.set_wide(ASQ, sq);
        self.set_wide(ACQ, cq);
        self.set(CC, ENABLED);
        Self::wait("readiness", || self.get(CSTS) & 1 == 1);
        let ring = |at| Ring { id: 0, at, size: ADMIN_ENTRIES, index: 0, phase: true };
        (self.submissions, self.completions) = (vec![ring(sq)], vec![ring(cq)]);
    }

    /// One submission queue for each processor. If there are fewer vectors, several of them share a
    /// completion queue (microsoft/openvmm pull request 1945).
    fn create_queues(&mut self) {
        let groups = if self.vectors == 0 { 1 } else { self.processors.min(self.vectors - 1) };
        for id in 1..=groups.max(1) {
            let vector = if self.vectors == 0 { 0 } else { id };
            self.create_completion(id, vector, true);
        }
        for id in 1..=self.processors {
            self.create_submission(id, (id - 1) % groups.max(1) + 1);
        }
    }

    pub(super) fn create_completion(&mut self, id: u16, vector: u16, interrupts: bool) {
        let at = QUEUES + QUEUE_SIZE * (2 * u64::from(id) + 1);
        self.fill(at, &[0; 16 * ENTRIES as usize]);
        let flags = u32::from(vector) << 16 | u32::from(interrupts) << 1 | 1;
        let queue = u32::from(id) | (ENTRIES - 1) << 16;
        let create = command(0x05, 0, &[(10, queue), (11, flags)]);
        assert_eq!(self.admin(with_data(create, at, 0)).status, 0, "completion queue {id}");
        self.completions.push(Ring { id, at, size: ENTRIES, index: 0, phase: true });
    }

    pub(super) fn create_submission(&mut self, id: u16, to: u16) {
        let at = QUEUES + QUEUE_SIZE * 2 * u64::from(id);
        let queue = u32::from(id) | (ENTRIES - 1) << 16;
        let create = command(0x01, 0, &[(10, queue), (11, u32::from(to) << 16 | 1)]);
        assert_eq!(self.admin(with_data(create, at, 0)).status, 0, "submission queue {id}");
        self.submissions.push(Ring { id, at, size: ENTRIES, index: 0, phase: true });
    }

    /// Puts a command into a queue, and rings its doorbell. Shadow doorbells are not used
    /// (Microsoft: stornvme-command-set-support, Doorbell Buffer Config).
    pub(super) fn submit(&mut self, queue: u16, mut dwords: Dwords) -> u16 {
        let id = self.next;
        self.next = self.next.wrapping_add(1);
        dwords[0] |= u32::from(id) << 16;
        let bytes: Vec<u8> = dwords.iter().flat_map(|it| it.to_le_bytes()).collect();
        let ring = &mut self.submissions[usize::from(queue)];
        let at = ring.at + 64 * u64::from(ring.index);
        ring.index = (ring.index + 1) % ring.size;
        let Ring { id: number, index, .. } = *ring;
        self.fill(at, &bytes);
        self.set(DOORBELLS + 8 * u64::from(number), index);
        id
    }

    /// Takes a completion from a queue if there is one, and frees its entry.
    pub(super) fn poll(&mut self, queue: u16) -> Option<Done> {
        let ring = &mut self.completions[usize::from(queue)];
        let mut bytes = [0; 16];
        self.bench.memory.read(ring.at + 16 * u64::from(ring.index), &mut bytes).unwrap();
        let word = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        if (word(14) & 1 == 1) != ring.phase {
            return None;
        }
        ring.index = (ring.index + 1) % ring.size;
        ring.phase ^= ring.index == 0;
        let Ring { id, index, .. } = *ring;
        self.set(DOORBELLS + 8 * u64::from(id) + 4, index);
        let result = u32::from(word(0)) | u32::from(word(2)) << 16;
        Some(Done { result, queue: word(10), id: word(12), status: word(14) >> 1 })
    }

    pub(super) fn next(&mut self, queue: u16) -> Done {
        eventually("a completion", || self.poll(queue))
    }

    pub(super) fn admin(&mut self, dwords: Dwords) -> Done {
        let id = self.submit(0, dwords);
        let done = self.next(0);
        assert_eq!((done.id, done.queue), (id, 0));
        done
    }

    /// Executes a command in the queue of a processor.
    pub(super) fn io(&mut self, queue: u16, dwords: Dwords) -> Done {
        let id = self.submit(queue, dwords);
        let done = self.next(queue);
        assert_eq!((done.id, done.queue), (id, queue));
        done
    }

    pub(super) fn identify(&mut self, structure: u32, nsid: u32) -> [u8; 4096] {
        self.fill(PAGE, &[0xee; 4096]);
        let identify = command(0x06, nsid, &[(10, structure)]);
        let done = self.admin(with_data(identify, PAGE, 0));
        assert_eq!(done.status, 0, "structure {structure}");
        self.data(PAGE)
    }

    /// Reads a log page. The data is one page, or two (PRP 2).
    pub(super) fn log(&mut self, page: u32, bytes: u32) -> Done {
        let log = command(0x02, u32::MAX, &[(10, page | (bytes / 4 - 1) << 16)]);
        self.admin(with_data(log, PAGE, PAGE + 4096))
    }

    pub(super) fn fill(&self, at: u64, data: &[u8]) {
        self.bench.memory.write(at, data).unwrap();
    }

    pub(super) fn data<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut data = [0; N];
        self.bench.memory.read(at, &mut data).unwrap();
        data
    }

    /// A read or write of pages, of which the first begins at `offset`. Storport gives each request
    /// a list of its own in the request's extension, which may begin anywhere in a page, and
    /// continues in the next page (NVMe 1.4, 4.3).
    pub(super) fn transfer(&self, write: bool, block: u64, buffer: &Buffer) -> Dwords {
        let blocks = u32::try_from(buffer.length / 512).unwrap();
        let opcode = if write { 0x01 } else { 0x02 };
        let dwords = [(10, low(block)), (11, low(block >> 32)), (12, blocks - 1)];
        let dwords = command(opcode, 1, &dwords);
        let pages: Vec<u64> = (1..buffer.pages()).map(|page| buffer.page(page)).collect();
        let second = match pages.as_slice() {
            [] => 0,
            [one] => *one,
            _ => self.list(&pages, LISTS + buffer.list),
        };
        with_data(dwords, buffer.page(0) + buffer.offset, second)
    }

    fn list(&self, mut pages: &[u64], start: u64) -> u64 {
        let mut at = start;
        while let [page, rest @ ..] = pages {
            if at & 0xfff == 0xff8 && !rest.is_empty() {
                let next = (at & !0xfff) + 0x3000;
                self.fill(at, &next.to_le_bytes());
                at = next;
                continue;
            }
            self.fill(at, &page.to_le_bytes());
            (at, pages) = (at + 8, rest);
        }
        start
    }

    /// The number of messages with this vector.
    pub(super) fn interrupts(&self, vector: u16) -> usize {
        messages(&self.bench).iter().filter(|it| **it == u32::from(vector)).count()
    }
}

/// A buffer of pages that are not adjacent.
pub(super) struct Buffer {
    pub(super) at: u64,
    /// Offset of the data in the first page: a multiple of 4.
    pub(super) offset: u64,
    pub(super) length: u64,
    /// Offset of the PRP list in its page: a multiple of 8.
    pub(super) list: u64,
}

impl Buffer {
    pub(super) fn of(at: u64, length: u64) -> Self {
        Self { at, offset: 0, length, list: 0 }
    }

    fn pages(&self) -> u64 {
        (self.offset + self.length).div_ceil(4096)
    }

    fn page(&self, number: u64) -> u64 {
        self.at + (self.pages() - number) * 0x2000
    }

    pub(super) fn write(&self, driver: &Stornvme, data: &[u8]) {
        self.each(|at, range| driver.fill(at, &data[range]));
    }

    pub(super) fn read(&self, driver: &Stornvme) -> Vec<u8> {
        let mut data = vec![0; usize::try_from(self.length).unwrap()];
        self.each(|at, range| driver.bench.memory.read(at, &mut data[range]).unwrap());
        data
    }

    fn each(&self, mut act: impl FnMut(u64, std::ops::Range<usize>)) {
        let (mut done, mut within, mut page) = (0, self.offset, 0);
        while done < self.length {
            let length = (4096 - within).min(self.length - done);
            let start = usize::try_from(done).unwrap();
            let end = usize::try_from(done + length).unwrap();
            act(self.page(page) + within, start..end);
            (done, within, page) = (done + length, 0, page + 1);
        }
    }
}
