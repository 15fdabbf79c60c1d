//! Passes an open file over the control socket: SCM_RIGHTS, with the first byte of a command.

use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Reads from a client, and keeps the last file that it passed. Others are closed.
pub(super) struct Incoming<'a> {
    client: &'a UnixStream,
    file: Option<OwnedFd>,
}

impl<'a> Incoming<'a> {
    pub(super) fn new(client: &'a UnixStream) -> Self {
        Self { client, file: None }
    }

    pub(super) fn take_file(&mut self) -> Option<OwnedFd> {
        self.file.take()
    }
}

impl Read for Incoming<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        // Files that do not fit are closed by the kernel.
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut rights = RecvAncillaryBuffer::new(&mut space);
        let mut vectors = [IoSliceMut::new(buffer)];
        let got = recvmsg(self.client, &mut vectors, &mut rights, RecvFlags::CMSG_CLOEXEC)?;
        for message in rights.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                self.file = files.last().or_else(|| self.file.take());
            }
        }
        Ok(got.bytes)
    }
}

/// Returns the number of bytes that were sent.
pub(super) fn send(
    stream: &UnixStream,
    bytes: &[u8],
    file: BorrowedFd<'_>,
) -> rustix::io::Result<usize> {
    let files = [file];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut rights = SendAncillaryBuffer::new(&mut space);
    rights.push(SendAncillaryMessage::ScmRights(&files));
    sendmsg(stream, &[IoSlice::new(bytes)], &mut rights, SendFlags::NOSIGNAL)
}

#[cfg(test)]
mod test {
    use std::fs::File;
    use std::io::{Seek as _, Write as _};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_file_arrives_open_with_its_bytes_and_only_the_last_is_kept() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut reader = Incoming::new(&ours);
        theirs.write_all(b"plain").unwrap();
        let mut bytes = [0; 16];
        assert_eq!(reader.read(&mut bytes).unwrap(), 5);
        assert!(reader.take_file().is_none());
        for text in ["first", "second"] {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(text.as_bytes()).unwrap();
            file.rewind().unwrap();
            assert_eq!(send(&theirs, b"x", file.as_fd()).unwrap(), 1);
        }
        drop(theirs);
        while reader.read(&mut bytes[..1]).unwrap() == 1 {}
        let mut text = String::new();
        File::from(reader.take_file().unwrap()).read_to_string(&mut text).unwrap();
        assert_eq!(text, "second");
    }
}
