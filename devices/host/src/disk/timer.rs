//! A file descriptor that combines the event of a channel with a timer. Channels that wrap another
//! channel wait for both.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use anyhow::Context;
use rustix::event::epoll;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

/// Readable when the channel is, or when the timer has expired.
pub(super) struct Timer {
    timer: OwnedFd,
    both: OwnedFd,
}

impl Timer {
    pub(super) fn with_event(event: BorrowedFd<'_>) -> anyhow::Result<Self> {
        let both = epoll::create(epoll::CreateFlags::CLOEXEC).context("an epoll for a disk")?;
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags).context("a disk's timer")?;
        for fd in [event, timer.as_fd()] {
            epoll::add(&both, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)
                .context("an epoll for a disk")?;
        }
        Ok(Self { timer, both })
    }

    pub(super) fn event(&self) -> BorrowedFd<'_> {
        self.both.as_fd()
    }

    /// `None` clears the timer.
    pub(super) fn set(&self, after: Option<Duration>) {
        // Zero would clear the timer.
        let after = after.map_or(Duration::ZERO, |it| it.max(Duration::from_nanos(1)));
        let none = Timespec { tv_sec: 0, tv_nsec: 0 };
        let it_value = Timespec::try_from(after).unwrap_or(none);
        let once = Itimerspec { it_interval: none, it_value };
        // Setting the timer also makes it unreadable again.
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once).ok();
    }
}
