//! The socket to `vmm`. Each frame has a length prefix of four bytes in big-endian order, as in
//! passt(1) and QEMU's `-netdev stream`.
//!
//! Threats: a guest may have taken over `vmm`. An invalid length ends the connection. If the peer
//! does not read, data waits at its source, and other frames are dropped.

use std::cell::{Cell, OnceCell, RefCell};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use tokio::net::UnixStream;
use tokio::sync::Notify;

use super::packet::ETHERNET;

/// Bytes of a length prefix.
const LENGTH: usize = 4;
/// The maximum size of a frame in bytes: the longest packet, an Ethernet header and a VLAN tag.
const MAX_FRAME: usize = 65535 + ETHERNET + 4;
/// The size of the input buffer in bytes: several of the longest frames.
const INPUT: usize = 256 << 10;
/// The maximum number of frames that are handled before other tasks run.
const MAX_BURST: usize = 256;
/// The output buffer is full at this size, in bytes. The last frame may exceed it.
const OUTPUT: usize = 256 << 10;
/// Additional output for frames that cannot wait, in bytes.
const URGENT: usize = 128 << 10;

/// The network as the rest of the pod sees it.
#[derive(Debug, Default)]
pub struct Traffic {
    /// Bytes of all frames so far, in both directions.
    bytes: AtomicU64,
    /// Open TCP connections of outside hosts to forwarded ports.
    connections: AtomicUsize,
    /// The guest is asleep, and is not to be woken without need.
    quiet: AtomicBool,
}

impl Traffic {
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    pub fn set_quiet(&self, quiet: bool) {
        self.quiet.store(quiet, Ordering::Relaxed);
    }

    pub fn is_quiet(&self) -> bool {
        self.quiet.load(Ordering::Relaxed)
    }

    fn count(&self, bytes: usize) {
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// Counts an incoming connection until it is dropped.
pub struct Counted(Arc<Traffic>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Frames to the guest.
#[derive(Debug, Default)]
pub struct Link {
    output: RefCell<Vec<u8>>,
    connected: Cell<bool>,
    filled: Notify,
    drained: Notify,
    traffic: OnceCell<Arc<Traffic>>,
}

impl Link {
    /// Counts from now on.
    pub fn count_in(&self, traffic: Arc<Traffic>) {
        self.traffic.get_or_init(|| traffic);
    }

    pub fn is_quiet(&self) -> bool {
        self.traffic.get().is_some_and(|traffic| traffic.is_quiet())
    }

    pub fn count(&self, bytes: usize) {
        if let Some(traffic) = self.traffic.get() {
            traffic.count(bytes);
        }
    }

    /// Counts a connection of an outside host.
    pub fn count_connection(&self) -> Option<Counted> {
        let traffic = self.traffic.get()?;
        traffic.connections.fetch_add(1, Ordering::Relaxed);
        Some(Counted(traffic.clone()))
    }

    /// Whether there is room for frames that can wait.
    pub fn has_room(&self) -> bool {
        self.output.borrow().len() < OUTPUT
    }

    /// Waits until there is room again.
    pub async fn room(&self) {
        let drained = self.drained.notified();
        if !self.has_room() {
            drained.await;
        }
    }

    pub fn is_connected(&self) -> bool {
        self.connected.get()
    }

    /// Sets whether there is a guest, and drops all queued frames.
    pub fn connect(&self, connected: bool) {
        self.connected.set(connected);
        self.output.borrow_mut().clear();
        self.drained.notify_waiters();
    }

    /// Queues frames, which `write` appends. Returns false if the link is full and they are
    /// dropped. Without a guest they are dropped as well, but this returns true, as no retry is
    /// needed.
    pub fn send(&self, write: impl FnOnce(&mut Vec<u8>)) -> bool {
        let mut output = self.output.borrow_mut();
        if !self.connected.get() {
            return true;
        }
        if output.len() >= OUTPUT + URGENT {
            return false;
        }
        write(&mut output);
        self.filled.notify_one();
        true
    }

    /// Sends queued frames until the peer disconnects.
    pub async fn drain(&self, socket: &UnixStream) -> io::Result<()> {
        let mut chunk = Vec::new();
        loop {
            while self.output.borrow().is_empty() {
                self.filled.notified().await;
            }
            chunk.clear();
            std::mem::swap(&mut chunk, &mut *self.output.borrow_mut());
            self.drained.notify_waiters();
            self.count(chunk.len());
            let mut rest = chunk.as_slice();
            while !rest.is_empty() {
                socket.writable().await?;
                match socket.try_write(rest) {
                    Ok(count) => rest = &rest[count..],
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) if has_left(&error) => return Ok(()),
                    Err(error) => return Err(error),
                }
            }
        }
    }
}

/// Whether the peer has disconnected, and left frames unread.
fn has_left(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
}

/// Reads frames until the peer disconnects, and passes each to `take`.
pub async fn read(socket: &UnixStream, mut take: impl FnMut(&[u8])) -> io::Result<()> {
    let mut input = vec![0; INPUT];
    let mut filled = 0;
    loop {
        socket.readable().await?;
        match socket.try_read(&mut input[filled..]) {
            Ok(0) => return Ok(()),
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            Err(error) if has_left(&error) => return Ok(()),
            Err(error) => return Err(error),
        }
        let mut used = 0;
        loop {
            let count = split(&input[used..filled], &mut take)?;
            if count == 0 {
                break;
            }
            used += count;
            // Lets the tasks run that these frames are for.
            tokio::task::yield_now().await;
        }
        input.copy_within(used..filled, 0);
        filled -= used;
    }
}

/// Passes complete frames to `take`, up to [`MAX_BURST`]. Returns the number of their bytes.
fn split(input: &[u8], take: &mut impl FnMut(&[u8])) -> io::Result<usize> {
    let mut rest = input;
    for _ in 0..MAX_BURST {
        let Some((length, behind)) = rest.split_first_chunk::<LENGTH>() else { break };
        let number = u32::from_be_bytes(*length);
        let length = usize::try_from(number).unwrap_or(usize::MAX);
        if !(ETHERNET..=MAX_FRAME).contains(&length) {
            let sentence = format!("a frame of {number} bytes is invalid");
            return Err(io::Error::new(io::ErrorKind::InvalidData, sentence));
        }
        let Some((frame, behind)) = behind.split_at_checked(length) else { break };
        take(frame);
        rest = behind;
    }
    Ok(input.len() - rest.len())
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn complete_frames_are_taken_and_the_rest_is_kept() {
        let mut frames = Vec::new();
        let input = [&[0, 0, 0, 14][..], &[1; 14], &[0, 0, 0, 20], &[2; 20], &[0, 0]].concat();
        let used = split(&input, &mut |frame| frames.push(frame.to_vec())).unwrap();
        assert_eq!((used, frames), (42, vec![vec![1; 14], vec![2; 20]]));
        assert_eq!(split(&input[..20], &mut |_| ()).unwrap(), 18);
    }

    #[test]
    fn a_burst_is_limited() {
        let input = [&[0, 0, 0, 14][..], &[1; 14]].concat().repeat(MAX_BURST + 1);
        let mut count = 0;
        assert_eq!(split(&input, &mut |_| count += 1).unwrap(), 18 * MAX_BURST);
        assert_eq!(count, MAX_BURST);
    }

    #[test]
    fn an_invalid_frame_length_ends_the_connection() {
        for bad in [0, 13, 65554, u32::MAX] {
            assert!(split(&u32::to_be_bytes(bad), &mut |_| ()).is_err(), "{bad}");
        }
    }

    #[tokio::test]
    async fn a_peer_that_leaves_frames_unread_has_disconnected() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.writable().await.unwrap();
        ours.try_write(&[0]).unwrap();
        drop(theirs);
        read(&ours, |_| panic!("a frame")).await.unwrap();
        let link = Link::default();
        link.connect(true);
        assert!(link.send(|frame| frame.resize(60, 1)));
        link.drain(&ours).await.unwrap();
    }

    #[test]
    fn a_stalled_peer_loses_frames_and_memory_is_bounded() {
        let link = Link::default();
        assert!(link.send(|_| panic!("there is no guest")));
        link.connect(true);
        while link.send(|output| output.extend([0; 60_000])) {}
        assert!(!link.has_room() && link.output.borrow().len() < OUTPUT + URGENT + 60_000);
        link.connect(false);
        assert!(link.has_room());
    }
}
