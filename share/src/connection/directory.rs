//! QUERY_DIRECTORY ([MS-SMB2] 2.2.33).

use std::os::fd::AsFd;

use crate::connection::negotiate::MAX_DATA;
use crate::connection::open::READ_DATA;
use crate::connection::{Connection, Context};
use crate::listing::{self, Listing};
use crate::message::{Reply, Request};
use crate::status::{Answer, Status};
use crate::wire::{index, text};

/// The longest pattern in bytes: names have at most 255 letters.
const MAX_PATTERN: usize = 510;
const RESTART: u8 = 1;
const SINGLE: u8 = 2;
const REOPEN: u8 = 0x10;

impl Connection {
    pub(crate) fn query_directory(
        &mut self,
        context: &Context,
        request: &Request<'_>,
    ) -> Answer<Reply> {
        request.expect(33)?;
        let (class, flags, limit) = (request.u8(2)?, request.u8(3)?, request.u32(28)?);
        let pattern = request.buffer(request.u16(24)?.into(), request.u16(26)?.into())?;
        if pattern.len() > MAX_PATTERN {
            return Err(Status::OBJECT_NAME_INVALID);
        }
        let pattern = text(pattern)?;
        let file = self.file(context, request, 8)?;
        if !file.directory {
            return Err(Status::INVALID_PARAMETER);
        }
        file.require(READ_DATA)?;
        if limit > MAX_DATA {
            return Err(Status::INVALID_PARAMETER);
        }
        request.check_charge(limit)?;
        listing::fixed_size(class).ok_or(Status::INVALID_INFO_CLASS)?;
        if file.listing.is_none() || flags & (RESTART | REOPEN) != 0 {
            let pattern = if pattern.is_empty() { "*".to_owned() } else { pattern };
            file.listing = Some(Listing::new(file.fd.as_fd(), pattern)?);
        }
        let mut listing = file.listing.take().ok_or(Status::INTERNAL_ERROR)?;
        let answer = listing::fill(
            &mut listing,
            file.fd.as_fd(),
            class,
            (index(limit), flags & SINGLE != 0),
        );
        file.listing = Some(listing);
        answer.map(|it| Reply::buffer(Status::SUCCESS, &it))
    }
}
