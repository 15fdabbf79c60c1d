//! The picture that all clients see: a copy of the display's memory.
//!
//! The copy exists while there are viewers, and is updated while any of them waits for changes.
//! Pages that the guest wrote are copied and compared, and tiles that really differ are marked for
//! each client. Without viewers there is no cost. A client that does not read delays no other.
//!
//! Threats: the guest may change the mode at any moment. The mode is checked and read once per
//! scan. The picture and the sets of tiles of its size change under one lock.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock, Weak};
use std::time::{Duration, Instant};

use host::display::{Mode, PAGE_BYTES, Scanout};
use host::input::{Hub, Lights};
use tokio::sync::{Notify, watch};
use tokio::time::timeout;

use super::pending::PendingUpdate;
use super::picture::Picture;
use super::scroll::Scroll;
use super::tiles::{TILE, Tiles};

/// Color before the first picture: dim instead of black, so that the viewer's window is visible.
const FIRST_COLOUR: u32 = 0x0018_1818;
const FIRST_SIZE: (u16, u16) = (640, 480);
/// Maximum width and height. A display of 64 MiB cannot have more.
const MAX_SIDE: u32 = 8192;
/// Maximum offset of the picture's end in the display's memory.
const MAX_END: u64 = 1 << 30;
const REFRESH_TIMEOUT: Duration = Duration::from_secs(1);
/// If more pages than this have changed, they are copied on a blocking thread.
const MAX_INLINE_PAGES: u32 = 256;

/// State of one client: pixels to be sent, and wake-ups.
pub struct Viewer {
    pending: Mutex<PendingUpdate>,
    /// The client waits for changes.
    waits: AtomicBool,
    /// Notified when there may be something to send.
    pub wake: Notify,
    /// Shared with the canvas.
    wanted: Arc<Notify>,
}

impl Drop for Viewer {
    /// Wakes the canvas, which frees the picture when the last viewer is gone.
    fn drop(&mut self) {
        self.wanted.notify_one();
    }
}

impl Viewer {
    pub fn pending<T>(&self, work: impl FnOnce(&mut PendingUpdate) -> T) -> T {
        work(&mut self.pending.lock().expect("no viewer panicked"))
    }

    pub fn dirty<T>(&self, work: impl FnOnce(&mut Tiles) -> T) -> T {
        self.pending(|pending| work(pending.dirty()))
    }
}

pub struct Canvas {
    scanout: Option<Arc<dyn Scanout>>,
    hub: Arc<Hub>,
    picture: RwLock<Picture>,
    viewers: Mutex<Vec<Weak<Viewer>>>,
    scan: Mutex<Scan>,
    /// State of the keyboard's lights at the last scan.
    lights: Mutex<Option<Lights>>,
    /// Notified when a viewer begins to wait, arrives or leaves.
    wanted: Arc<Notify>,
    /// Notified on input, because the guest may draw in response.
    scan_soon: Notify,
    /// Number of scans that were started.
    begun: AtomicU64,
    /// Number of the last scan that is complete.
    done: watch::Sender<u64>,
}

/// State that only scans use.
#[derive(Default)]
struct Scan {
    mode: Option<Mode>,
    pages: Vec<u64>,
    line: Vec<u8>,
    /// Present while any client supports moves.
    scroll: Option<Scroll>,
}

/// A picture that is being updated, and its tiles that have changed so far.
struct Target<'a> {
    picture: &'a mut Picture,
    changed: &'a mut Tiles,
}

/// Decides when the next scan starts.
struct Pace {
    interval: Duration,
    still: u32,
}

impl Pace {
    /// A little more than 60 scans per second, because timers are late.
    const FAST: Duration = Duration::from_millis(15);
    /// Interval after a pause: the maximum delay of the first change.
    const SLOW: Duration = Duration::from_millis(40);
    /// Interval after a long pause, which mostly ends with a key press. It decides what a still
    /// screen costs.
    const SLOWEST: Duration = Duration::from_millis(200);
    /// Delay of the first scan after input. The guest has often drawn its response by then.
    const AFTER_INPUT: Duration = Duration::from_millis(4);
    /// Scans without a change that count as a pause.
    const PAUSE: u32 = 32;
    /// Scans without a change that count as a long pause: about five seconds.
    const LONG_PAUSE: u32 = Self::PAUSE + 125;

    fn new() -> Self {
        Self { interval: Self::FAST, still: 0 }
    }

    fn saw(&mut self, change: bool) {
        self.still = if change { 0 } else { self.still.saturating_add(1) };
        self.interval = match self.still {
            still if still > Self::LONG_PAUSE => Self::SLOWEST,
            still if still > Self::PAUSE => Self::SLOW,
            _ => Self::FAST,
        };
    }
}

impl Canvas {
    pub fn new(scanout: Option<Arc<dyn Scanout>>, hub: Arc<Hub>) -> Arc<Self> {
        Arc::new(Self {
            scanout,
            hub,
            picture: RwLock::default(),
            viewers: Mutex::default(),
            scan: Mutex::default(),
            lights: Mutex::default(),
            wanted: Arc::default(),
            scan_soon: Notify::new(),
            begun: AtomicU64::new(0),
            done: watch::Sender::new(0),
        })
    }

    pub fn scanout(&self) -> Option<&Arc<dyn Scanout>> {
        self.scanout.as_ref()
    }

    pub fn lights(&self) -> Option<Lights> {
        *self.lights.lock().expect("no scan panicked")
    }

    /// Locks the picture for reading. Its size equals that of all clients' sets of tiles meanwhile.
    pub fn with_picture<T>(&self, work: impl FnOnce(&Picture) -> T) -> T {
        work(&self.picture.read().expect("no canvas panicked"))
    }

    /// Adds a viewer, which has received nothing of the picture.
    pub fn admit(&self) -> Arc<Viewer> {
        let picture = loop {
            let picture = self.picture.read().expect("no canvas panicked");
            if !picture.pixels.is_empty() {
                break picture;
            }
            drop(picture);
            self.scan(true);
        };
        let viewer = Arc::new(Viewer {
            pending: Mutex::new(PendingUpdate::all(picture.size())),
            waits: AtomicBool::new(false),
            wake: Notify::new(),
            wanted: self.wanted.clone(),
        });
        let mut viewers = self.viewers.lock().expect("no canvas panicked");
        viewers.push(Arc::downgrade(&viewer));
        self.wanted.notify_one();
        viewer
    }

    pub fn wait(&self, viewer: &Viewer, waits: bool) {
        if viewer.waits.swap(waits, Ordering::Relaxed) != waits && waits {
            self.wanted.notify_one();
        }
    }

    /// Schedules a scan soon, because a client typed or clicked.
    pub fn scan_soon(&self) {
        self.scan_soon.notify_one();
    }

    /// Waits until a scan that starts after this call is complete. It starts one even if no viewer
    /// waited for changes.
    pub async fn refresh(&self, viewer: &Viewer) {
        let next = self.begun.load(Ordering::SeqCst) + 1;
        let mut done = self.done.subscribe();
        self.wait(viewer, true);
        self.scan_soon();
        timeout(REFRESH_TIMEOUT, done.wait_for(|last| *last >= next)).await.ok();
    }

    /// Keeps the picture up to date while it is polled.
    pub async fn run(self: Arc<Self>) {
        let mut pace = Pace::new();
        loop {
            let viewers = self.viewers();
            if viewers.is_empty() {
                self.free();
                self.wanted.notified().await;
                continue;
            }
            if !viewers.iter().any(|it| it.waits.load(Ordering::Relaxed)) {
                drop(viewers);
                self.wanted.notified().await;
                continue;
            }
            drop(viewers);
            let start = Instant::now();
            let number = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
            pace.saw(self.clone().step().await);
            self.done.send_replace(number);
            // However large the picture is, scans take at most half of a processor.
            let sleep = pace.interval.saturating_sub(start.elapsed()).max(start.elapsed());
            tokio::select! {
                () = tokio::time::sleep(sleep) => {}
                () = self.scan_soon.notified() => {
                    pace = Pace::new();
                    // Mice send up to a thousand events per second.
                    let early = (Pace::FAST / 2).saturating_sub(start.elapsed());
                    tokio::time::sleep(Pace::AFTER_INPUT.max(early)).await;
                }
            }
        }
    }

    /// Returns true if something changed.
    async fn step(self: Arc<Self>) -> bool {
        if !self.poll() {
            return false;
        }
        let inline = {
            let scan = self.scan.lock().expect("no scan panicked");
            scan.pages.iter().map(|it| it.count_ones()).sum::<u32>() < MAX_INLINE_PAGES
        };
        if inline {
            return self.scan(false);
        }
        tokio::task::spawn_blocking(move || self.scan(false)).await.unwrap_or(false)
    }

    /// Reads the lights and the list of written pages. Returns true if the picture may have
    /// changed.
    fn poll(&self) -> bool {
        let lights = self.hub.lights();
        let before = std::mem::replace(&mut *self.lights.lock().expect("no scan panicked"), lights);
        if before != lights {
            self.viewers().iter().for_each(|viewer| viewer.wake.notify_one());
        }
        let Some(scanout) = &self.scanout else { return false };
        let mut scan = self.scan.lock().expect("no scan panicked");
        let scan = &mut *scan;
        scanout.changed(&mut scan.pages);
        scan.pages.iter().any(|word| *word != 0) || checked(scanout.mode()) != scan.mode
    }

    fn viewers(&self) -> Vec<Arc<Viewer>> {
        let mut viewers = self.viewers.lock().expect("no canvas panicked");
        viewers.retain(|viewer| viewer.strong_count() > 0);
        viewers.iter().filter_map(Weak::upgrade).collect()
    }

    /// Frees the picture, unless a viewer has arrived.
    fn free(&self) {
        let mut scan = self.scan.lock().expect("no scan panicked");
        let mut picture = self.picture.write().expect("no canvas panicked");
        if self.viewers().is_empty() {
            *picture = Picture::default();
            *scan = Scan::default();
        }
    }

    /// Copies the written pages, or everything if `all` is set. Returns true if a pixel changed.
    fn scan(&self, all: bool) -> bool {
        let mut scan = self.scan.lock().expect("no scan panicked");
        let scan = &mut *scan;
        if let Some(scanout) = self.scanout.as_ref().filter(|_| all) {
            // Resets the list of written pages: this scan copies them all.
            scanout.changed(&mut scan.pages);
        }
        let mode = checked(self.scanout.as_ref().and_then(|it| it.mode()));
        scan.moves(self.viewers().iter().any(|it| it.pending(|pending| pending.copies)));
        let mut picture = self.picture.write().expect("no canvas panicked");
        let before = picture.size();
        let mut changed = Tiles::none(before.0, before.1);
        let anew = all || mode != scan.mode;
        scan.mode = mode;
        match (mode, &self.scanout) {
            (Some(mode), Some(scanout)) => {
                let size = size(&mode);
                if size != before || picture.pixels.is_empty() {
                    picture.fill(size, FIRST_COLOUR);
                    changed = Tiles::all(size.0, size.1);
                }
                if anew {
                    scan.pages.clear();
                    let end = mode.start + u64::from(mode.stride) * u64::from(mode.height);
                    scan.pages.resize(to_usize(end.div_ceil(PAGE_BYTES).div_ceil(64)), u64::MAX);
                }
                let to = &mut Target { picture: &mut picture, changed: &mut changed };
                scan.copy(&mode, scanout.as_ref(), to);
            }
            _ if anew || picture.pixels.is_empty() => {
                let first = picture.pixels.is_empty();
                let (size, colour) = if first { (FIRST_SIZE, FIRST_COLOUR) } else { (before, 0) };
                picture.fill(size, colour);
                changed = Tiles::all(picture.width, picture.height);
            }
            _ => {}
        }
        scan.pages.fill(0);
        let moves = scan.scroll.as_mut().map(|it| it.find(&picture, &changed)).unwrap_or_default();
        if changed.is_empty() {
            return false;
        }
        // Keep the lock of the picture: the clients' sets must have its size.
        for viewer in self.viewers() {
            viewer.pending(|pending| pending.change(&changed, &moves));
            viewer.wake.notify_one();
        }
        true
    }
}

/// Rejects modes that a picture cannot have. The screen then counts as switched off.
fn checked(mode: Option<Mode>) -> Option<Mode> {
    mode.filter(|mode| {
        let sides = (1..=MAX_SIDE).contains(&mode.width) && (1..=MAX_SIDE).contains(&mode.height);
        let end = mode.start.checked_add(u64::from(mode.stride) * u64::from(mode.height));
        let near = end.is_some_and(|end| end <= MAX_END);
        sides && near && u64::from(mode.stride) >= u64::from(mode.width) * 4
    })
}

fn size(mode: &Mode) -> (u16, u16) {
    let side = |length| u16::try_from(length).unwrap_or(u16::MAX);
    (side(mode.width), side(mode.height))
}

fn to_usize(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

impl Scan {
    /// Allocates or frees the search for moves, depending on whether any client supports them.
    fn moves(&mut self, wanted: bool) {
        if !wanted {
            self.scroll = None;
        } else if self.scroll.is_none() {
            self.scroll = Some(Scroll::default());
        }
    }

    /// Copies the written pages and marks the tiles that differ.
    fn copy(&mut self, mode: &Mode, from: &dyn Scanout, to: &mut Target<'_>) {
        if let Some(scroll) = &mut self.scroll {
            let pages: usize = self.pages.iter().map(|it| it.count_ones() as usize).sum();
            scroll.save(to.picture, pages * to_usize(PAGE_BYTES / 4));
        }
        let mut next = 0;
        let count = self.pages.len() as u64 * 64;
        while next < count {
            let word = self.pages[to_usize(next / 64)] >> (next % 64);
            if word == 0 {
                next = (next / 64 + 1) * 64;
                continue;
            }
            let first = next + u64::from(word.trailing_zeros());
            let mut end = first;
            while end < count && self.pages[to_usize(end / 64)] >> (end % 64) & 1 != 0 {
                end += 1;
            }
            self.copy_bytes(mode, first * PAGE_BYTES..end * PAGE_BYTES, from, to);
            next = end;
        }
    }

    /// Copies the part of the picture in a range of the display's memory, row by row.
    fn copy_bytes(
        &mut self,
        mode: &Mode,
        range: std::ops::Range<u64>,
        from: &dyn Scanout,
        to: &mut Target<'_>,
    ) {
        let (stride, width) = (u64::from(mode.stride), u64::from(mode.width) * 4);
        let start = range.start.saturating_sub(mode.start);
        let Some(end) = range.end.checked_sub(mode.start).filter(|end| *end > start) else {
            return;
        };
        let lines = start / stride..end.div_ceil(stride).min(mode.height.into());
        for y in lines {
            let line = y * stride;
            // Align to whole pixels.
            let left = start.saturating_sub(line).min(width) & !3;
            let right = (end - line).min(width).next_multiple_of(4);
            if left >= right {
                continue;
            }
            self.line.resize(to_usize(right - left), 0);
            from.read(mode.start + line + left, &mut self.line);
            let x = to_usize(left / 4);
            let at = to_usize(y) * usize::from(to.picture.width) + x;
            let (new, _) = self.line.as_chunks::<4>();
            let Some(old) = to.picture.pixels.get_mut(at..at + new.len()) else { return };
            compare(old, new, (x, to_usize(y)), to.changed);
        }
    }
}

/// Copies a part of a row, and marks the tiles that differ.
fn compare(old: &mut [u32], new: &[[u8; 4]], (x, y): (usize, usize), changed: &mut Tiles) {
    let tile = usize::from(TILE);
    let pixel = |four: &[u8; 4]| u32::from_le_bytes(*four) & 0x00ff_ffff;
    let mut at = 0;
    while at < new.len() {
        let end = (at + tile - (x + at) % tile).min(new.len());
        let (old, new) = (&mut old[at..end], &new[at..end]);
        // Compare without stopping early. This is faster, because mostly nothing differs.
        let differ = |all, (old, new): (&u32, &[u8; 4])| all | (old ^ pixel(new));
        if old.iter().zip(new).fold(0, differ) != 0 {
            old.iter_mut().zip(new).for_each(|(old, new)| *old = pixel(new));
            let number = |at: usize| u16::try_from(at).unwrap_or(u16::MAX);
            changed.insert(number(x + at), number(y));
        }
        at = end;
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::rfb::picture::Area;
    use crate::rfb::testing::FakeDisplay;

    fn areas(viewer: &Viewer) -> Vec<Area> {
        let mut areas = Vec::new();
        viewer.dirty(|dirty| dirty.take(usize::MAX, &mut areas));
        areas
    }

    fn area(x: u16, y: u16, width: u16, height: u16) -> Area {
        Area { x, y, width, height }
    }

    #[test]
    fn a_still_picture_is_polled_less_often_until_it_changes() {
        let mut pace = Pace::new();
        let mut intervals = Vec::new();
        let mut time = Duration::ZERO;
        while time < Duration::from_secs(20) {
            pace.saw(false);
            intervals.push(pace.interval);
            time += pace.interval;
        }
        assert!(intervals.is_sorted() && intervals.contains(&Pace::SLOW), "{intervals:?}");
        assert_eq!(intervals.last(), Some(&Pace::SLOWEST));
        pace.saw(true);
        assert_eq!(pace.interval, Pace::FAST);
    }

    #[test]
    fn only_changed_tiles_are_marked() {
        let fake = FakeDisplay::new(200, 100);
        let canvas = Canvas::new(Some(fake.clone()), Arc::default());
        let viewer = canvas.admit();
        assert_eq!(areas(&viewer), [area(0, 0, 200, 100)]);
        fake.draw(40, 70, 0x0012_3456);
        fake.touch();
        assert!(canvas.poll() && canvas.scan(false));
        assert_eq!(areas(&viewer), [area(32, 64, 32, 32)]);
        canvas.with_picture(|picture| assert_eq!(picture.pixels[70 * 200 + 40], 0x0012_3456));
        canvas.with_picture(|picture| assert_eq!(picture.pixels[70 * 200 + 41], 0));
        fake.touch();
        assert!(canvas.poll() && !canvas.scan(false), "written, but unchanged");
        // The fourth byte of a pixel is ignored.
        fake.draw(40, 70, 0xff12_3456);
        assert!(canvas.poll() && !canvas.scan(false), "the same color");
        assert!(!canvas.poll(), "not written");
        assert!(areas(&viewer).is_empty());
    }

    #[test]
    fn padded_lines_and_unaligned_starts_are_read() {
        let fake = FakeDisplay::new(33, 40);
        fake.set(Some(Mode { width: 33, height: 40, stride: 150, start: 4094 }));
        fake.draw(32, 39, 0x00ab_cdef);
        let canvas = Canvas::new(Some(fake.clone()), Arc::default());
        let viewer = canvas.admit();
        areas(&viewer);
        let last = |canvas: &Canvas| canvas.with_picture(|picture| picture.pixels[39 * 33 + 32]);
        assert_eq!(last(&canvas), 0x00ab_cdef);
        fake.draw(32, 39, 0x0000_0001);
        assert!(canvas.poll() && canvas.scan(false));
        assert_eq!(last(&canvas), 1);
        assert_eq!(areas(&viewer), [area(32, 32, 1, 8)]);
    }

    #[test]
    fn a_new_mode_redraws_all_and_no_mode_is_black() {
        let fake = FakeDisplay::new(64, 64);
        let canvas = Canvas::new(Some(fake.clone()), Arc::default());
        let viewer = canvas.admit();
        areas(&viewer);
        fake.set(Some(Mode { width: 100, height: 50, stride: 400, start: 0 }));
        assert!(canvas.poll() && canvas.scan(false));
        assert_eq!(areas(&viewer), [area(0, 0, 100, 50)]);
        fake.set(None);
        assert!(canvas.poll() && canvas.scan(false));
        assert_eq!(canvas.with_picture(Picture::size), (100, 50));
        canvas.with_picture(|picture| assert!(picture.pixels.iter().all(|pixel| *pixel == 0)));
        for silly in [
            Mode { width: 100, height: 50, stride: 399, start: 0 },
            Mode { width: 100, height: 9000, stride: 400, start: 0 },
            Mode { width: 0, height: 5, stride: 400, start: 0 },
            Mode { width: 100, height: 50, stride: 400, start: u64::MAX },
        ] {
            fake.set(Some(silly));
            assert!(!canvas.poll(), "{silly:?} is off");
        }
    }

    #[test]
    fn a_machine_without_display_has_a_dim_picture() {
        let canvas = Canvas::new(None, Arc::default());
        let viewer = canvas.admit();
        assert_eq!(areas(&viewer), [area(0, 0, 640, 480)]);
        assert!(!canvas.poll());
        drop(viewer);
        assert!(canvas.viewers().is_empty());
        canvas.free();
        canvas.with_picture(|picture| assert_eq!(picture.pixels.capacity(), 0));
    }
}
