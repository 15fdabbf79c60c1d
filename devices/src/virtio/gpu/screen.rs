//! The state of the device, which its worker changes, and the viewers' interface to it.

use std::sync::{Arc, Mutex, MutexGuard};

use anyhow::ensure;
use serde::{Deserialize, Serialize};

use super::cursor::{self, Pointer};
use super::resource::{Failure, Rectangle, Resource, Resources};
use crate::bus::Window;
use crate::bytes::Bytes;
use crate::device::Saved;
use crate::display::bochs::{self, Bochs};
use crate::pages;
use crate::virtio::Signal;
use host::display::{Mode, Scanout};
use host::memory::Memory;

/// The event of a changed display (VIRTIO 1.3, 5.7.4).
const EVENT_DISPLAY: u32 = 1;

/// The driver's settings. The default is power-on.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct State {
    pub(super) resources: Resources,
    /// The shown part of a resource.
    scanout: Option<(u32, Rectangle)>,
    /// A driver has shown a resource: the linear frame buffer is not shown any more.
    driven: bool,
    pointer: Pointer,
    events: u32,
}

impl State {
    pub(super) fn remove(&mut self, id: u32) -> Result<(), Failure> {
        self.resources.remove(id)?;
        self.scanout = self.scanout.filter(|it| it.0 != id);
        Ok(())
    }

    /// The number of extents that the list of this resource may have.
    pub(super) fn room(&self, id: u32) -> Result<usize, Failure> {
        let attached = !self.resources.get(id)?.extents.is_empty();
        if attached { Err(Failure::Unspecified) } else { Ok(self.resources.room()) }
    }

    /// Viewers read the guest's memory, where pixels have natural offsets.
    pub(super) fn check_transfer(
        &self,
        id: u32,
        rectangle: Rectangle,
        offset: u64,
    ) -> Result<(), Failure> {
        let resource = self.resources.get(id)?;
        if resource.extents.is_empty() {
            return Err(Failure::Resource);
        }
        let natural = resource.contains(rectangle) && resource.offset(rectangle) == offset;
        if natural { Ok(()) } else { Err(Failure::Parameter) }
    }

    /// The resource that is shown, and the mode.
    fn shown(&self) -> Option<(&Resource, Mode)> {
        let (id, part) = self.scanout?;
        let resource = self.resources.get(id).ok()?;
        let stride = u32::try_from(resource.stride()).unwrap_or(u32::MAX);
        let (width, height) = (part.width, part.height);
        Some((resource, Mode { width, height, stride, start: resource.offset(part) }))
    }

    /// Checks a saved state.
    fn check(&self, limit: u64) -> anyhow::Result<()> {
        self.resources.check(limit)?;
        if let Some((id, part)) = self.scanout {
            let resource = self.resources.get(id).ok();
            let valid = resource.is_some_and(|it| !part.is_empty() && it.contains(part));
            ensure!(valid, "a scanout of resource {id}");
        }
        Ok(())
    }
}

pub(super) struct Screen {
    linear: Arc<bochs::Screen>,
    /// The linear frame buffer's window.
    window: Arc<Window>,
    memory: Memory,
    inner: Mutex<Inner>,
}

struct Inner {
    state: State,
    /// Written pages of the display's memory, which is the shown resource.
    changed: pages::Pages,
    /// Present while a driver runs.
    signal: Option<Arc<Signal>>,
}

impl Inner {
    fn mark_all(&mut self, limit: u64) {
        self.changed.mark(0, usize::try_from(limit).unwrap_or(usize::MAX));
    }

    fn mark_pointer(&mut self) {
        if let Some((_, mode)) = self.state.shown() {
            self.state.pointer.mark(&mode, &mut self.changed);
        }
    }
}

impl Screen {
    pub(super) fn new(linear: &Bochs, memory: Memory) -> Self {
        let window = linear.window.clone();
        let changed = pages::Pages::empty(window.size);
        let inner = Mutex::new(Inner { state: State::default(), changed, signal: None });
        Self { linear: linear.screen.clone(), window, memory, inner }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no device panicked")
    }

    /// Gives access to the state, and the maximum size of a picture in bytes.
    pub(super) fn with<T>(&self, work: impl FnOnce(&mut State, u64) -> T) -> T {
        work(&mut self.inner().state, self.window.size)
    }

    /// The preferred width and height.
    pub(super) fn preferred(&self) -> (u32, u32) {
        let size = self.linear.preferred().0;
        (size.width(), size.height())
    }

    pub(super) fn edid(&self) -> Vec<u8> {
        self.linear.preferred().1.clone()
    }

    /// Shows a part of a resource. Resource 0 switches the scanout off.
    pub(super) fn show(&self, id: u32, part: Rectangle) -> Result<(), Failure> {
        let mut inner = self.inner();
        if id == 0 {
            inner.state.scanout = None;
            return Ok(());
        }
        if part.is_empty() || !inner.state.resources.get(id)?.contains(part) {
            return Err(Failure::Parameter);
        }
        inner.state.scanout = Some((id, part));
        inner.state.driven = true;
        inner.mark_all(self.window.size);
        Ok(())
    }

    /// Marks a part of a resource as drawn.
    pub(super) fn flush(&self, id: u32, drawn: Rectangle) -> Result<(), Failure> {
        let mut inner = self.inner();
        let Inner { state, changed, .. } = &mut *inner;
        let resource = state.resources.get(id)?;
        if !resource.contains(drawn) {
            return Err(Failure::Parameter);
        }
        if let Some((_, shown)) = state.scanout.filter(|it| it.0 == id) {
            let common = drawn.common(shown);
            let length = usize::try_from(common.width).unwrap_or(0) * 4;
            for row in 0..common.height {
                let start = resource.offset(common) + u64::from(row) * resource.stride();
                changed.mark(start, length);
            }
        }
        Ok(())
    }

    /// Takes the image of the pointer from a resource. Other resources than images hide it.
    pub(super) fn set_pointer(&self, id: u32, at: (i32, i32)) {
        let mut inner = self.inner();
        inner.mark_pointer();
        let resource = inner.state.resources.get(id).ok();
        let sized = |it: &&Resource| (it.width, it.height) == (cursor::SIDE, cursor::SIDE);
        let image = resource.filter(sized).map(|resource| {
            let mut image = Box::<Bytes<{ cursor::BYTES }>>::default();
            resource.extents.read(0, &mut image[..], |address, part| self.fetch(address, part));
            resource.convert(&mut image[..]);
            image
        });
        inner.state.pointer = Pointer { at, image };
        inner.mark_pointer();
    }

    pub(super) fn move_pointer(&self, at: (i32, i32)) {
        let mut inner = self.inner();
        inner.mark_pointer();
        inner.state.pointer.at = at;
        inner.mark_pointer();
    }

    /// Reads the guest's memory: RAM, or the linear frame buffer. Other memory reads as it was.
    fn fetch(&self, address: u64, data: &mut [u8]) {
        let window = || self.window.at().filter(|at| *at <= address);
        if self.memory.read(address, data).is_err()
            && let Some(at) = window()
        {
            self.linear.read(address - at, data);
        }
    }

    pub(super) fn events(&self) -> u32 {
        self.inner().state.events
    }

    pub(super) fn clear_events(&self, events: u32) {
        self.inner().state.events &= !events;
    }

    /// Called with the signal when the driver starts, and with `None` when it stops.
    pub(super) fn connect(&self, signal: Option<Arc<Signal>>) {
        let mut inner = self.inner();
        inner.signal = signal;
        // A viewer may have asked meanwhile.
        if let Some(signal) = inner.signal.as_ref().filter(|_| inner.state.events != 0) {
            signal.configuration();
        }
    }

    pub(super) fn save(&self) -> Saved {
        Saved::of(&self.inner().state)
    }

    pub(super) fn restore(&self, state: State) -> anyhow::Result<()> {
        state.check(self.window.size)?;
        let mut inner = self.inner();
        inner.state = state;
        inner.mark_all(self.window.size);
        Ok(())
    }
}

impl Scanout for Screen {
    fn mode(&self) -> Option<Mode> {
        let inner = self.inner();
        if inner.state.driven { inner.state.shown().map(|it| it.1) } else { self.linear.mode() }
    }

    fn changed(&self, pages: &mut Vec<u64>) {
        let mut inner = self.inner();
        if !inner.state.driven {
            self.linear.changed(pages);
        }
        inner.changed.move_to(pages);
    }

    fn read(&self, offset: u64, data: &mut [u8]) {
        let inner = self.inner();
        if !inner.state.driven {
            return self.linear.read(offset, data);
        }
        let Some((resource, mode)) = inner.state.shown() else { return };
        resource.extents.read(offset, data, |address, part| self.fetch(address, part));
        resource.convert(data);
        inner.state.pointer.draw(&mode, offset, data);
    }

    fn set_preferred_size(&self, width: u32, height: u32) -> bool {
        let before = self.preferred();
        let accepted = self.linear.set_preferred_size(width, height);
        if self.preferred() != before {
            let mut inner = self.inner();
            inner.state.events |= EVENT_DISPLAY;
            inner.signal.iter().for_each(|signal| signal.configuration());
        }
        accepted
    }

    fn resizes(&self) -> bool {
        true
    }
}
