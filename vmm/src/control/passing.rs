//! Passes open files over the control socket: SCM_RIGHTS, with the first byte of a command.

use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// The most files of one command.
const MAX_FILES: usize = 3;

/// Reads from a client, and keeps the files that it passed last. Others are closed.
pub(super) struct Incoming<'a> {
    client: &'a UnixStream,
    files: Vec<OwnedFd>,
}

impl<'a> Incoming<'a> {
    pub(super) fn new(client: &'a UnixStream) -> Self {
        Self { client, files: Vec::new() }
    }

    pub(super) fn take_files(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.files)
    }
}

impl Read for Incoming<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        // Files that do not fit are closed by the kernel.
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
        let mut rights = RecvAncillaryBuffer::new(&mut space);
        let mut vectors = [IoSliceMut::new(buffer)];
        let got = recvmsg(self.client, &mut vectors, &mut rights, RecvFlags::CMSG_CLOEXEC)?;
        for message in rights.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                self.files = files.take(MAX_FILES).collect();
            }
        }
        Ok(got.bytes)
    }
}

/// Returns the number of bytes that were sent.
pub(super) fn send(
    stream: &UnixStream,
    bytes: &[u8],
    files: &[BorrowedFd<'_>],
) -> rustix::io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
    let mut rights = SendAncillaryBuffer::new(&mut space);
    if !rights.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(rustix::io::Errno::MSGSIZE);
    }
    sendmsg(stream, &[IoSlice::new(bytes)], &mut rights, SendFlags::NOSIGNAL)
}

#[cfg(test)]
mod test {
    use std::fs::File;
    use std::io::{Seek as _, Write as _};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn files_arrive_open_with_their_bytes_and_only_the_last_are_kept() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut reader = Incoming::new(&ours);
        theirs.write_all(b"plain").unwrap();
        let mut bytes = [0; 16];
        assert_eq!(reader.read(&mut bytes).unwrap(), 5);
        assert!(reader.take_files().is_empty());
        let file = |text: &str| {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(text.as_bytes()).unwrap();
            file.rewind().unwrap();
            file
        };
        let sent = [file("first"), file("second"), file("third")];
        let fds: Vec<_> = sent.iter().map(AsFd::as_fd).collect();
        assert_eq!(send(&theirs, b"x", &fds[..1]).unwrap(), 1);
        assert_eq!(send(&theirs, b"x", &fds[1..]).unwrap(), 1);
        drop(theirs);
        while reader.read(&mut bytes[..1]).unwrap() == 1 {}
        let texts = reader.take_files().into_iter().map(|file| {
            let mut text = String::new();
            File::from(file).read_to_string(&mut text).unwrap();
            text
        });
        assert_eq!(texts.collect::<Vec<_>>(), ["second", "third"]);
    }
}
