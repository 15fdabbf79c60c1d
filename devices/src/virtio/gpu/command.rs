//! The commands of both queues (VIRTIO 1.3, 5.7.6), and their answers.

use super::resource::{Extents, Failure, Rectangle};
use super::screen::Screen;
use crate::virtio::{Chain, length};
use host::memory::Memory;

/// The queues (5.7.2).
pub(super) const CONTROL: u16 = 0;
pub(super) const CURSOR: u16 = 1;

// `enum virtio_gpu_ctrl_type` (5.7.6.7): commands, then answers.
const GET_DISPLAY_INFO: u32 = 0x0100;
const RESOURCE_CREATE_2D: u32 = 0x0101;
const RESOURCE_UNREF: u32 = 0x0102;
const SET_SCANOUT: u32 = 0x0103;
const RESOURCE_FLUSH: u32 = 0x0104;
const TRANSFER_TO_HOST_2D: u32 = 0x0105;
const RESOURCE_ATTACH_BACKING: u32 = 0x0106;
const RESOURCE_DETACH_BACKING: u32 = 0x0107;
const GET_EDID: u32 = 0x010a;
const UPDATE_CURSOR: u32 = 0x0300;
const MOVE_CURSOR: u32 = 0x0301;
const OK_NODATA: u32 = 0x1100;
const OK_DISPLAY_INFO: u32 = 0x1101;
const OK_EDID: u32 = 0x1104;

/// Words of `virtio_gpu_ctrl_hdr`: type, flags, fence (two words), context, padding.
const HEADER: usize = 6;
/// The flag of a command with a fence, which its answer repeats.
const FENCE: u32 = 1;
/// VIRTIO_GPU_MAX_SCANOUTS, the number of entries of an answer, and the words of each.
const MAX_SCANOUTS: usize = 16;
const DISPLAY_WORDS: usize = 6;
/// The size of the field for an EDID.
const EDID_BYTES: usize = 1024;

/// The unread part of a request.
struct Request<'a> {
    memory: &'a Memory,
    chain: &'a mut Chain,
}

impl Request<'_> {
    fn words<const N: usize>(&mut self) -> Result<[u32; N], Failure> {
        let mut words = [0; N];
        for word in &mut words {
            let bytes = self.chain.take(self.memory).map_err(|_| Failure::Unspecified)?;
            *word = u32::from_le_bytes(bytes);
        }
        Ok(words)
    }

    fn rectangle(&mut self) -> Result<Rectangle, Failure> {
        let [x, y, width, height] = self.words()?;
        Ok(Rectangle { x, y, width, height })
    }

    /// Reads `virtio_gpu_mem_entry`s, at most `room` of them.
    fn extents(&mut self, count: u32, room: usize) -> Result<Extents, Failure> {
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        if count > room {
            return Err(Failure::OutOfMemory);
        }
        let mut bytes = vec![0; count * 16];
        let read = self.memory.gather(&self.chain.readable, &mut bytes);
        read.map_err(|_| Failure::Unspecified)?;
        let mut extents = Extents::default();
        for entry in bytes.as_chunks::<16>().0 {
            let [a, b, c, d, e, f, g, h, i, j, k, l, ..] = *entry;
            let address = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
            if !extents.push(address, u32::from_le_bytes([i, j, k, l]).into()) {
                return Err(Failure::Parameter);
            }
        }
        Ok(extents)
    }
}

/// Executes a command of the control queue. Returns the length of the answer.
pub(super) fn control(screen: &Screen, memory: &Memory, chain: &mut Chain) -> u32 {
    let mut request = Request { memory, chain };
    let header = request.words::<HEADER>();
    let executed = header.and_then(|header| execute(screen, header[0], &mut request));
    let (kind, body) = executed.unwrap_or_else(|failure| (failure.code(), Vec::new()));
    let [_, flags, fence, fence_high, context, _] = header.unwrap_or_default();
    let fenced = if flags & FENCE != 0 { [FENCE, fence, fence_high, context] } else { [0; 4] };
    let words = [kind, fenced[0], fenced[1], fenced[2], fenced[3], 0];
    let mut answer: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
    answer.extend(body);
    answer.truncate(usize::try_from(length(&chain.writable)).unwrap_or(usize::MAX));
    let written = memory.scatter(&chain.writable, &answer).map_or(0, |()| answer.len());
    u32::try_from(written).unwrap_or(0)
}

/// The type of the answer, and the part after its header.
type Answer = (u32, Vec<u8>);

fn execute(screen: &Screen, command: u32, request: &mut Request<'_>) -> Result<Answer, Failure> {
    match command {
        GET_DISPLAY_INFO => return Ok((OK_DISPLAY_INFO, display_info(screen))),
        GET_EDID => return Ok((OK_EDID, edid(screen, request.words()?)?)),
        RESOURCE_CREATE_2D => {
            let [id, format, width, height] = request.words()?;
            screen
                .with(|state, limit| state.resources.create(id, [format, width, height], limit))?;
        }
        RESOURCE_UNREF => {
            let [id, _] = request.words()?;
            screen.with(|state, _| state.remove(id))?;
        }
        SET_SCANOUT => {
            let rectangle = request.rectangle()?;
            let [scanout, id] = request.words()?;
            if scanout != 0 {
                return Err(Failure::Scanout);
            }
            screen.show(id, rectangle)?;
        }
        RESOURCE_FLUSH => {
            let rectangle = request.rectangle()?;
            let [id, _] = request.words()?;
            screen.flush(id, rectangle)?;
        }
        TRANSFER_TO_HOST_2D => {
            let rectangle = request.rectangle()?;
            let [low, high, id, _] = request.words()?;
            let offset = u64::from(low) | u64::from(high) << 32;
            screen.with(|state, _| state.check_transfer(id, rectangle, offset))?;
        }
        RESOURCE_ATTACH_BACKING => {
            let [id, count] = request.words()?;
            let room = screen.with(|state, _| state.room(id))?;
            let extents = request.extents(count, room)?;
            screen.with(|state, _| state.resources.set_extents(id, extents))?;
        }
        RESOURCE_DETACH_BACKING => {
            let [id, _] = request.words()?;
            screen.with(|state, _| state.resources.set_extents(id, Extents::default()))?;
        }
        _ => return Err(Failure::Unspecified),
    }
    Ok((OK_NODATA, Vec::new()))
}

/// An entry for each scanout: a rectangle, whether it is connected, and flags.
fn display_info(screen: &Screen) -> Vec<u8> {
    let (width, height) = screen.preferred();
    let mut words = [0; MAX_SCANOUTS * DISPLAY_WORDS];
    words[..5].copy_from_slice(&[0, 0, width, height, 1]);
    words.into_iter().flat_map(u32::to_le_bytes).collect()
}

fn edid(screen: &Screen, [scanout, _]: [u32; 2]) -> Result<Vec<u8>, Failure> {
    if scanout != 0 {
        return Err(Failure::Scanout);
    }
    let edid = screen.edid();
    let mut body = u32::try_from(edid.len()).unwrap_or(0).to_le_bytes().to_vec();
    body.extend([0; 4]);
    body.extend(edid);
    body.resize(8 + EDID_BYTES, 0);
    Ok(body)
}

/// Executes a command of the cursor queue, which has no answer.
pub(super) fn cursor(screen: &Screen, memory: &Memory, chain: &mut Chain) -> u32 {
    let mut request = Request { memory, chain };
    let Ok([kind, ..]) = request.words::<HEADER>() else { return 0 };
    let Ok([scanout, x, y, _, id]) = request.words() else { return 0 };
    let at = (x.cast_signed(), y.cast_signed());
    match (scanout, kind) {
        (0, UPDATE_CURSOR) => screen.set_pointer(id, at),
        (0, MOVE_CURSOR) => screen.move_pointer(at),
        _ => {}
    }
    0
}
