//! A machine that is asleep: saved, parked, and without its memory, which stays in the snapshot.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::Builder;

use anyhow::{Context, ensure};
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde_json::json;

use super::MainLoop;
use crate::control::Request;

/// The state of a machine that is asleep.
pub(super) struct Asleep {
    frames: Arc<Frames>,
    /// Closing it ends the waiting of the client that waits for a frame.
    waiting: Option<OwnedFd>,
}

impl MainLoop {
    /// Watches for frames from now on, and lets the networks drop those for which a guest that is
    /// asleep does not wake.
    pub(super) fn watch_frames(&self) -> anyhow::Result<Frames> {
        self.filter_frames(true)?;
        let links = self.machine.shared().links.all();
        let files = links.iter().filter_map(|(_, link)| link.arrivals()).map(|it| it.files());
        let files = files.collect::<io::Result<Vec<_>>>();
        let frames = files.and_then(|it| Frames::new(it.into_iter().flatten().collect()));
        if frames.is_err() {
            self.filter_frames(false).ok();
        }
        frames.context("the networks")
    }

    /// The networks filter frames, or deliver all again.
    pub(super) fn filter_frames(&self, on: bool) -> anyhow::Result<()> {
        for (name, link) in self.machine.shared().links.all() {
            let Some(arrivals) = link.arrivals() else { continue };
            match arrivals.filter(on) {
                Err(error) if on => {
                    self.filter_frames(false)?;
                    return Err(error).with_context(|| {
                        format!("{name}: its network cannot wake a machine that is asleep")
                    });
                }
                // There is none, or the interface is gone.
                _ => {}
            }
        }
        Ok(())
    }

    /// The machine was saved, and its memory returned to the host.
    pub(super) fn fall_asleep(&mut self, frames: Frames) {
        self.asleep = Some(Asleep { frames: Arc::new(frames), waiting: None });
    }

    /// Ends the sleep of a machine that is woken or switched off. Its frames wait for the devices.
    pub(super) fn wake_up(&mut self) {
        if self.asleep.take().is_some() {
            self.filter_frames(false).ok();
        }
    }

    /// Answers the request when a frame arrives, or when the machine is not asleep any more.
    pub(super) fn await_frame(&mut self, request: Request) {
        let Some(asleep) = &mut self.asleep else {
            return request.answer(Ok(json!({ "frame": false })));
        };
        match rustix::pipe::pipe() {
            Err(error) => request.answer(Err(error).context("the client that waits")),
            Ok((ended, stop)) => {
                // The client before gets its answer.
                asleep.waiting = Some(stop);
                let frames = asleep.frames.clone();
                let body =
                    move || request.answer(frames.wait(&ended).map(|it| json!({ "frame": it })));
                // If no thread can be created, the request is dropped and its client gets an error.
                Builder::new().name("doze".into()).spawn(body).ok();
            }
        }
    }
}

/// Frames that arrive. Those that wait already do not count: their guest does not take them.
pub(super) struct Frames {
    /// It reports each file when something arrives there, as long as that waits.
    epoll: OwnedFd,
    /// Kept open while they are watched.
    _files: Vec<OwnedFd>,
}

impl Frames {
    fn new(files: Vec<OwnedFd>) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let mut seen = Vec::with_capacity(files.len() + 1);
        for file in &files {
            epoll::add(&epoll, file, EventData::new_u64(0), EventFlags::IN | EventFlags::ET)?;
        }
        // One report of all that waits now.
        epoll::wait(&epoll, spare_capacity(&mut seen), Some(&Timespec::default()))?;
        Ok(Self { epoll, _files: files })
    }

    /// Returns true when a frame waits, and false when the other end of the pipe closes.
    fn wait(&self, ended: &OwnedFd) -> anyhow::Result<bool> {
        let mut fds = [&self.epoll, ended].map(|file| PollFd::new(file, PollFlags::IN));
        while let Err(error) = poll(&mut fds, None) {
            ensure!(error == Errno::INTR, "waiting for a frame: {error}");
        }
        Ok(fds[1].revents().is_empty())
    }
}

#[cfg(test)]
mod test {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn only_frames_that_arrive_later_and_wait_are_reported() {
        let waits = |frames: &Frames| {
            let mut fds = [PollFd::new(&frames.epoll, PollFlags::IN)];
            poll(&mut fds, Some(&Timespec::default())).unwrap() == 1
        };
        let (mut peer, mut guest) = UnixStream::pair().unwrap();
        peer.write_all(b"old").unwrap();
        let file = guest.try_clone().unwrap().into();
        let frames = Frames::new(vec![file]).unwrap();
        assert!(!waits(&frames), "nothing has arrived since");
        // The guest takes this one before it sleeps.
        peer.write_all(b"new").unwrap();
        guest.read_exact(&mut [0; 6]).unwrap();
        assert!(!waits(&frames));
        peer.write_all(b"new").unwrap();
        let (ended, stop) = rustix::pipe::pipe().unwrap();
        assert!(frames.wait(&ended).unwrap() && frames.wait(&ended).unwrap(), "it still waits");
        guest.read_exact(&mut [0; 3]).unwrap();
        drop(stop);
        assert!(!frames.wait(&ended).unwrap());
    }
}
