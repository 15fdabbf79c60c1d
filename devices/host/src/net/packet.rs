//! Sockets that hear packets of one kind at one interface (packet(7)).
#![expect(unsafe_code, reason = "no library makes an address of this family")]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

/// A socket, not waiting, of what is said at this interface in the protocol of this number, without
/// the header of the frame. It takes NET_RAW.
///
/// # Errors
///
/// When we may not, or there is no such interface.
pub fn hear(protocol: u16, interface: u32) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    // Without a protocol it hears nothing before it is bound.
    let socket = socket_with(AddressFamily::PACKET, SocketType::DGRAM, flags, None)?;
    let address = libc::sockaddr_ll {
        sll_family: AddressFamily::PACKET.as_raw(),
        sll_protocol: protocol.to_be(),
        sll_ifindex: interface.cast_signed(),
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    let length = libc::socklen_t::try_from(size_of_val(&address)).map_err(io::Error::other)?;
    // SAFETY: the address is a whole one of its family, and is there during the call.
    let bound = unsafe {
        libc::bind(socket.as_raw_fd(), (&raw const address).cast::<libc::sockaddr>(), length)
    };
    if bound < 0 { Err(io::Error::last_os_error()) } else { Ok(socket) }
}

#[cfg(test)]
mod test {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn it_is_at_the_interface_that_was_named() {
        const ARP: u16 = 0x806;
        match hear(ARP, 0x7fff_ffff) {
            Err(error) if Errno::from_io_error(&error) == Some(Errno::PERM) => {}
            other => {
                assert_eq!(Errno::from_io_error(&other.unwrap_err()), Some(Errno::NODEV));
                // The loopback, which each network has.
                hear(ARP, 1).unwrap();
            }
        }
    }
}
