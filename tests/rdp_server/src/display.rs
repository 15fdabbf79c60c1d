//! A desktop of one colour, which takes the size that its client asks for.

use std::num::{NonZeroU16, NonZeroUsize};

use anyhow::{Context as _, Result};
use ironrdp_displaycontrol::pdu::DisplayControlMonitorLayout;
use ironrdp_server::{
    BitmapUpdate, DesktopSize, DisplayUpdate, PixelFormat, RdpServerDisplay,
    RdpServerDisplayUpdates,
};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// A green that no part of the page has.
const COLOR: [u8; 4] = [0x40, 0xa0, 0x20, 0xff];
const FIRST: DesktopSize = DesktopSize { width: 1024, height: 768 };

pub(crate) struct Display {
    size: DesktopSize,
    updates: Option<UnboundedSender<DisplayUpdate>>,
}

impl Default for Display {
    fn default() -> Self {
        Self { size: FIRST, updates: None }
    }
}

#[async_trait::async_trait]
impl RdpServerDisplay for Display {
    async fn size(&mut self) -> DesktopSize {
        self.size
    }

    async fn updates(&mut self) -> Result<Box<dyn RdpServerDisplayUpdates>> {
        let (sender, updates) = unbounded_channel();
        for update in picture(self.size)? {
            sender.send(DisplayUpdate::Bitmap(update))?;
        }
        self.updates = Some(sender);
        Ok(Box::new(Updates(updates)))
    }

    fn request_layout(&mut self, layout: DisplayControlMonitorLayout) {
        let Some(monitor) = layout.monitors().first() else { return };
        let (width, height) = monitor.dimensions();
        let (Ok(width), Ok(height)) = (width.try_into(), height.try_into()) else { return };
        println!("size {width}x{height}");
        self.size = DesktopSize { width, height };
        if let Some(updates) = &self.updates {
            updates.send(DisplayUpdate::Resize(self.size)).ok();
        }
    }
}

struct Updates(UnboundedReceiver<DisplayUpdate>);

#[async_trait::async_trait]
impl RdpServerDisplayUpdates for Updates {
    async fn next_update(&mut self) -> Result<Option<DisplayUpdate>> {
        Ok(self.0.recv().await)
    }
}

/// The whole desktop, line by line: an update has a limited size.
fn picture(size: DesktopSize) -> Result<Vec<BitmapUpdate>> {
    let width = NonZeroU16::new(size.width).context("no width")?;
    let line = COLOR.repeat(size.width.into());
    let stride = NonZeroUsize::new(line.len()).context("no width")?;
    let height = NonZeroU16::MIN;
    let data = bytes::Bytes::from(line);
    let line = |y| {
        let (data, format) = (data.clone(), PixelFormat::BgrA32);
        BitmapUpdate { x: 0, y, width, height, format, data, stride }
    };
    Ok((0..size.height).map(line).collect())
}
