//! viogpudo.sys, the display driver of virtio-win: not a closed driver, but one that runs in
//! Windows only. Each step names its function in virtio-win/kvm-guest-drivers-windows, commit
//! fbcc19d7, `viogpu/viogpudo/viogpudo.cpp` unless another file is named. Conjecture: the order in
//! which Windows calls the driver (DxgkDdi…), and that it asks for another mode after
//! `UpdateChildStatus`.
//!
//! Releases until 2025 place the frame buffer in BAR 0 if it is large enough, later ones in RAM
//! (`viogpudo.inx`: UsePhysicalMemory). Commands are queued without waiting for answers, except the
//! two that ask.

use std::sync::Arc;

use devices::device::Kind;
use devices::pci::Address;
use devices::registry::Config;
use devices::testutil::Bench;
use devices::testutil::driver::Driver;
use host::display::{Mode, PAGE_BYTES, Scanout};
use serde_json::json;

use crate::pci::Function;
use crate::{eventually, messages};

const AT: Address = Address::new(1, 0);
const BAR0: u64 = 0xa000_0000;
const BAR2: u64 = 0xb000_0000;
/// `Driver` places the table of MSI-X there.
const TABLE: u64 = 0xc000_0000;
/// Memory of the display, and the address of a frame buffer in RAM.
const MEMORY: u64 = 32 << 20;
const SEGMENT: u64 = 40 << 20;
/// Pages of the nonpaged pool with commands, which are used in turn, and the pointer's pages.
const POOL: u64 = 16 << 20;
const POINTER: u64 = 32 << 20;
const PAGE: u64 = 4096;

/// `virtio_gpu_ctrl_hdr` is 24 bytes; `viogpu_queue.cpp`: MAX_INLINE_RESP_SIZE.
const HEADER: u32 = 24;
const OK_NODATA: u32 = 0x1100;
/// D3DDDIFMT_X8R8G8B8 (`ColorFormat`).
const B8G8R8X8: u32 = 2;
const B8G8R8A8: u32 = 1;

/// `viogpu_pci.cpp`: `vdev_get_msix_vector`, and `InterruptRoutine`.
const CHANGE: u32 = 0;
const DISPLAY: u32 = 1;

struct Windows<'a> {
    bench: &'a Bench,
    driver: Driver<'a>,
    screen: Arc<dyn Scanout>,
    /// Where the frame buffer is (`m_FrameSegment`): BAR 0 or RAM.
    segment: u64,
    /// The next page of the pool.
    pool: u64,
    /// The frame buffer's resource (`m_pFrameBuf`), and the mode.
    resource: u32,
    size: (u32, u32),
    /// Answers that were not read yet.
    pending: Vec<u64>,
}

fn bench() -> Bench {
    let config = json!({ "slot": "01.0", "memory": "32M", "mode": "1280x800" });
    let config = Config::of_kind("virtio-gpu", config).unwrap().unwrap();
    let mut bench = Bench::new(80 << 20);
    bench.board.add("virtio-gpu", |grants| config.build(grants)).unwrap();
    bench.board.run(Vec::new()).unwrap();
    bench
}

/// Firmware's mode, in the order of edk2's QemuVideoDxe.
fn firmware(bench: &Bench) {
    let pci = Function::find(bench, AT);
    pci.place(bench, 0, u32::try_from(BAR0).unwrap());
    pci.place(bench, 2, u32::try_from(BAR2).unwrap());
    pci.start(bench);
    for (index, value) in [(4, 0_u16), (3, 32), (1, 1280), (6, 1280), (2, 800), (7, 800), (4, 0x41)]
    {
        bench.write(Kind::Memory, BAR2 + 0x500 + 2 * index, &value.to_le_bytes());
    }
    bench.write(Kind::Memory, BAR2 + 0x400, &[0x20]);
}

impl<'a> Windows<'a> {
    /// `StartDevice`.
    fn start(bench: &'a Bench, segment: u64) -> Self {
        let pci = Function::find(bench, AT);
        // `CheckHardware`: with this subclass, Windows gives the display of the boot to the driver.
        assert_eq!(pci.get(bench, 0), 0x1050_1af4);
        assert_eq!(pci.get(bench, 8) >> 16 & 0xff, 0, "PCI_SUBCLASS_VID_VGA_CTLR");
        let driver = Driver::find(bench, AT);
        pci.connect_vectors(bench, TABLE, 3);
        let screen = bench.board.shared.screens.first().unwrap();
        let (pool, resource, size, pending) = (POOL, 0, (0, 0), Vec::new());
        let mut this = Self { bench, driver, screen, segment, pool, resource, size, pending };
        this.initialize();
        this.build_mode_list();
        this
    }

    /// `VioGpuAdapterInit`.
    fn initialize(&mut self) {
        let driver = &mut self.driver;
        // The driver accepts no feature besides VERSION_1, but uses the EDID if it is offered.
        assert_ne!(driver.features() & 1 << 1, 0, "VIRTIO_GPU_F_EDID");
        assert!(driver.negotiate(0));
        driver.set_common(16, &[0, 0]);
        driver.enable(0, 256);
        driver.enable(1, 16);
        assert_eq!(driver.device::<8>(8), [1, 0, 0, 0, 0, 0, 0, 0], "scanouts, capability sets");
        driver.start();
    }

    fn page(&mut self) -> u64 {
        self.pool += PAGE;
        if self.pool == POINTER {
            self.pool = POOL + PAGE;
        }
        self.pool
    }

    /// `viogpu_queue.cpp`: `CtrlQueue::QueueBuffer`: a descriptor for the command, one for each
    /// page of its data, and one for the answer, which may be behind the command.
    fn queue(&mut self, command: &[u32], data: &[u8], room: u32) -> u64 {
        let words =
            |words: &[u32]| words.iter().flat_map(|it| it.to_le_bytes()).collect::<Vec<_>>();
        let header = words(&[command[0], 0, 0, 0, 0, 0]);
        let bytes = [header, words(&command[1..])].concat();
        assert!(bytes.len() <= 96, "MAX_INLINE_CMD_SIZE");
        let at = self.page();
        self.bench.memory.write(at, &bytes).unwrap();
        let length = u32::try_from(bytes.len()).unwrap();
        let mut chain = vec![(at, length, false)];
        for part in data.chunks(usize::try_from(PAGE).unwrap()) {
            let page = self.page();
            self.bench.memory.write(page, part).unwrap();
            chain.push((page, u32::try_from(part.len()).unwrap(), false));
        }
        let answer = if room > HEADER { self.page() } else { at + u64::from(length) };
        chain.push((answer, room, true));
        assert!(chain.len() <= 256, "SGLIST_SIZE");
        self.driver.offer(0, &chain);
        self.driver.kick(0);
        answer
    }

    /// A command whose answer only the DPC sees.
    fn command(&mut self, command: &[u32], data: &[u8]) {
        let answer = self.queue(command, data, HEADER);
        self.pending.push(answer);
    }

    /// `DpcRoutine`: takes all answers. An error would only be logged.
    fn settle(&mut self) {
        for answer in std::mem::take(&mut self.pending) {
            assert_eq!(self.driver.wait(0).length, HEADER);
            assert_eq!(self.driver.bytes(answer, 4), OK_NODATA.to_le_bytes());
        }
    }

    /// `CtrlQueue::AskDisplayInfo`, `AskEdidInfo`: waits at most a second for message 1.
    fn ask(&mut self, command: &[u32], room: u32) -> Vec<u8> {
        self.settle();
        self.bench.hypervisor.sent.lock().unwrap().clear();
        let answer = self.queue(command, &[], room);
        eventually("message 1", || messages(self.bench).contains(&DISPLAY).then_some(()));
        assert_eq!(self.driver.wait(0).length, room);
        self.driver.bytes(answer, room as usize)
    }

    /// `BuildModeList`: `GetEdids`, then `GetDisplayInfo`.
    fn build_mode_list(&mut self) {
        let edid = self.ask(&[0x10a, 0, 0], 1056);
        assert_eq!(edid[..4], 0x1104_u32.to_le_bytes());
        // `GetEdidInfo` copies 256 bytes; `GetCTA861Data` takes any extension for CTA-861.
        assert_eq!(
            (edid[32..40].to_vec(), edid[32 + 126]),
            (vec![0, 255, 255, 255, 255, 255, 255, 0], 0)
        );
        assert_eq!(self.display_info(), (1280, 800));
    }

    /// `GetDisplayInfo`: the custom mode (`SetCustomDisplay`).
    fn display_info(&mut self) -> (u32, u32) {
        let info = self.ask(&[0x100], 408);
        let word = |at: usize| u32::from_le_bytes(info[at..at + 4].try_into().unwrap());
        assert_eq!((word(0), word(24 + 16)), (0x1101, 1), "enabled");
        (word(24 + 8), word(24 + 12))
    }

    /// `GpuObjectAttach`: an entry for each page of the segment, not of the picture.
    fn attach(&mut self, resource: u32, address: u64, bytes: u64) {
        let mut entries = Vec::new();
        for page in (address..address + bytes).step_by(4096) {
            entries.extend(page.to_le_bytes());
            entries.extend(4096_u64.to_le_bytes());
        }
        let count = u32::try_from(bytes / PAGE).unwrap();
        self.command(&[0x106, resource, count], &entries);
    }

    /// `SetCurrentMode`: `DestroyFrameBufferObj(FALSE, FALSE)`, then `CreateFrameBufferObj`.
    fn set_mode(&mut self, (width, height): (u32, u32)) {
        if self.resource != 0 {
            self.destroy(false);
        }
        self.resource = 1;
        self.size = (width, height);
        self.command(&[0x101, self.resource, B8G8R8X8, width, height], &[]);
        self.attach(self.resource, self.segment, MEMORY);
        self.command(&[0x103, 0, 0, width, height, 0, self.resource], &[]);
        self.update((0, 0), (width, height));
        self.settle();
    }

    /// `DestroyFrameBufferObj`.
    fn destroy(&mut self, reset: bool) {
        self.command(&[0x107, self.resource, 0], &[]);
        self.command(&[0x102, self.resource, 0], &[]);
        if reset {
            self.command(&[0x103, 0, 0, 0, 0, 0, 0], &[]);
        }
        self.resource = 0;
    }

    /// `CtrlQueue::TransferToHost2D` and `ResFlush`, as `ExecutePresentDisplayOnly` calls them.
    fn update(&mut self, (x, y): (u32, u32), (width, height): (u32, u32)) {
        let offset = y * self.size.0 * 4 + x * 4;
        self.command(&[0x105, x, y, width, height, offset, 0, self.resource, 0], &[]);
        self.command(&[0x104, x, y, width, height, self.resource, 0], &[]);
    }

    /// `BltBits` to the frame buffer, then `ExecutePresentDisplayOnly`'s update.
    fn present(&mut self, area: [u32; 4], color: u32) {
        let [x, y, width, height] = area;
        let line = color.to_le_bytes().repeat(width as usize);
        for row in y..y + height {
            let at = self.segment + u64::from((row * self.size.0 + x) * 4);
            if self.segment == BAR0 {
                line.chunks(8).zip((at..).step_by(8)).for_each(|(part, at)| {
                    self.bench.write(Kind::Memory, at, part);
                });
            } else {
                self.bench.memory.write(at, &line).unwrap();
            }
        }
        self.update((x, y), (width, height));
        self.settle();
    }

    /// `VioGpuAdapterClose`.
    fn close(&mut self) {
        self.pending.clear();
        self.driver.set_status(0);
        assert_eq!(self.driver.status(), 0);
    }

    fn pixel(&self, x: u32, y: u32) -> u32 {
        pixel(&*self.screen, x, y)
    }
}

fn pixel(screen: &dyn Scanout, x: u32, y: u32) -> u32 {
    let Mode { stride, start, .. } = screen.mode().unwrap();
    let mut pixel = [0; 4];
    screen.read(start + u64::from(y) * u64::from(stride) + u64::from(x) * 4, &mut pixel);
    u32::from_le_bytes(pixel)
}

fn size(screen: &dyn Scanout) -> Option<(u32, u32)> {
    screen.mode().map(|mode| (mode.width, mode.height))
}

fn changed(screen: &dyn Scanout) -> Vec<u64> {
    let mut pages = Vec::new();
    screen.changed(&mut pages);
    (0..MEMORY / PAGE_BYTES).filter(|it| pages[(it / 64) as usize] >> (it % 64) & 1 == 1).collect()
}

#[test]
fn draws_presents_and_follows_a_viewers_size() {
    for segment in [SEGMENT, BAR0] {
        let bench = bench();
        firmware(&bench);
        let mut windows = Windows::start(&bench, segment);
        assert_eq!(size(&*windows.screen), Some((1280, 800)), "firmware's picture");
        windows.set_mode((1024, 768));
        assert_eq!(size(&*windows.screen), Some((1024, 768)));
        changed(&*windows.screen);
        windows.present([100, 50, 20, 3], 0x11_2233);
        assert_eq!(changed(&*windows.screen), [50, 51, 52], "a line is a page");
        let seen = [(99, 50), (100, 50), (119, 52), (120, 52)].map(|(x, y)| windows.pixel(x, y));
        assert_eq!(seen, [0, 0x11_2233, 0x11_2233, 0]);
        // A viewer's window changes: message 0, `ThreadWorkRoutine`, `ConfigChanged`.
        windows.bench.hypervisor.sent.lock().unwrap().clear();
        assert!(windows.screen.set_preferred_size(1727, 1001));
        assert_eq!(messages(&bench), [CHANGE]);
        assert_eq!(windows.driver.device::<4>(0), [1, 0, 0, 0], "VIRTIO_GPU_EVENT_DISPLAY");
        let wanted = windows.display_info();
        windows.driver.set_device(4, &[1, 0, 0, 0]);
        assert_eq!(windows.driver.device::<4>(0), [0; 4]);
        assert_eq!(wanted, (1727, 1001));
        windows.set_mode(wanted);
        assert_eq!(size(&*windows.screen), Some(wanted));
        windows.present([1726, 1000, 1, 1], 0x77);
        assert_eq!(windows.pixel(1726, 1000), 0x77);
        // The largest mode needs all of the segment that the driver made at its start.
        assert!(windows.screen.set_preferred_size(3840, 2160));
        assert!(!windows.screen.set_preferred_size(3840, 2400), "no room for that in the segment");
        windows.set_mode((3840, 2160));
        windows.present([3839, 2159, 1, 1], 0x99);
        assert_eq!(windows.pixel(3839, 2159), 0x99);
    }
}

/// `SystemDisplayEnable` and `SystemDisplayWrite`, at any interrupt level: no answer is awaited.
#[test]
fn a_crash_is_shown_in_firmwares_mode() {
    let bench = bench();
    firmware(&bench);
    let mut windows = Windows::start(&bench, SEGMENT);
    windows.set_mode((1024, 768));
    windows.destroy(true);
    windows.close();
    assert_eq!(size(&*windows.screen), Some((1280, 800)), "m_SystemDisplayInfo");
    bench.write(Kind::Memory, BAR0 + 1280 * 4 * 7 + 4 * 9, &0x78d7_u32.to_le_bytes());
    assert_eq!(windows.pixel(9, 7), 0x78d7);
}

/// `SetPowerState`: D3 closes the adapter, D0 initializes it; a mode is set again afterwards. Then
/// `DxgkDdiStopDeviceAndReleasePostDisplayOwnership`, when the driver is replaced.
#[test]
fn sleeps_wakes_and_returns_the_display_to_windows() {
    let bench = bench();
    firmware(&bench);
    let mut windows = Windows::start(&bench, SEGMENT);
    for _ in 0..3 {
        windows.set_mode((1024, 768));
        windows.present([0, 0, 64, 64], 0x1234);
        windows.destroy(true);
        windows.settle();
        assert_eq!(size(&*windows.screen), None, "SetScanout(0, 0, …)");
        windows.close();
        windows.initialize();
    }
    windows.set_mode((1024, 768));
    windows.present([0, 0, 1024, 768], 0);
    windows.destroy(true);
    windows.close();
    assert_eq!(size(&*windows.screen), Some((1280, 800)), "for BasicDisplay.sys");
}

/// `SetPointerShape` and `SetPointerPosition`, which Windows calls if HWCursor is set in the
/// registry: by default, the pointer is part of the picture.
#[test]
fn the_pointer_is_shown_if_the_driver_has_one() {
    let bench = bench();
    firmware(&bench);
    let mut windows = Windows::start(&bench, SEGMENT);
    windows.set_mode((1024, 768));
    // `CreateCursor`, `UpdateCursor`.
    windows.command(&[0x101, 2, B8G8R8A8, 64, 64], &[]);
    windows.attach(2, POINTER, 4 * PAGE);
    bench.memory.write(POINTER, &0xff44_5566_u32.to_le_bytes()).unwrap();
    windows.command(&[0x105, 0, 0, 32, 32, 0, 0, 2, 0], &[]);
    windows.settle();
    let mut point = |kind: u32, x: u32, y: u32| {
        let words = [kind, 0, 0, 0, 0, 0, 0, x, y, 0, 2, 0, 0, 0];
        let bytes: Vec<u8> = words.iter().flat_map(|it| it.to_le_bytes()).collect();
        let at = windows.page();
        bench.memory.write(at, &bytes).unwrap();
        windows.driver.offer(1, &[(at, 56, false)]);
        windows.driver.kick(1);
        windows.driver.wait(1);
    };
    point(0x300, 0, 0);
    point(0x301, 500, 400);
    assert_eq!(windows.pixel(500, 400) & 0xff_ffff, 0x44_5566);
    assert_eq!(windows.pixel(0, 0), 0, "it moved");
}
