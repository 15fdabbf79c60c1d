//! Tracks what a client has not received yet: dirty tiles, and moves (CopyRect) to be sent first.
//!
//! Invariant, between any two calls: apply all pending moves to the client's picture, in order, as
//! it is once every planned update has arrived. Then every tile that is not dirty equals the
//! canvas.
//!
//! Pixels are taken when they are encoded, which is later than they are planned. A tile is *in
//! flight* from the moment its update is planned until it is encoded. Its final content is unknown
//! until then, so a move must not copy from it. Changing it meanwhile is harmless: the tile becomes
//! dirty again. A move copies within the client's own picture, so later changes of the canvas do
//! not disturb it: their pixels are sent after all moves that were found before.

use super::picture::{Area, Move};
use super::tiles::Tiles;

/// Further moves are sent as pixels instead.
const MAX_PENDING_MOVES: usize = 32;

/// Changes that one client has not received yet.
pub struct PendingUpdate {
    dirty: Tiles,
    in_flight: Tiles,
    moves: Vec<Move>,
    pub copies: bool,
}

impl PendingUpdate {
    /// A client that has received nothing of a picture of this size.
    pub fn all((width, height): (u16, u16)) -> Self {
        let (dirty, in_flight) = (Tiles::all(width, height), Tiles::none(width, height));
        Self { dirty, in_flight, moves: Vec::new(), copies: false }
    }

    /// The tiles whose pixels the client lacks.
    pub fn dirty(&mut self) -> &mut Tiles {
        &mut self.dirty
    }

    /// Enables or disables moves. When disabled, pending moves are replaced with dirty tiles.
    pub fn set_copies(&mut self, copies: bool) {
        self.copies = copies;
        if !copies {
            self.drop_moves();
        }
    }

    /// Records a change of the canvas. The `moves` explain some of the `changed` tiles; their
    /// sources are in the picture before the change.
    pub fn change(&mut self, changed: &Tiles, moves: &[Move]) {
        if self.dirty.size() != changed.size() {
            *self = Self { copies: self.copies, ..Self::all(changed.size()) };
            return;
        }
        if !self.copies || moves.is_empty() {
            self.dirty.unite(changed);
            return;
        }
        // Tiles of the previous picture that the client does not have.
        let mut other = self.dirty.clone();
        other.unite(&self.in_flight);
        self.dirty.unite(changed);
        for it in moves {
            let mut left = self.dirty.clone();
            it.apply(&other, &mut left);
            if self.moves.len() < MAX_PENDING_MOVES && left.count() < self.dirty.count() {
                self.moves.push(*it);
                self.dirty = left;
                other.insert_area(it.to);
            }
        }
    }

    /// Plans an update of the requested area: moves, which come first, and tiles whose pixels
    /// follow.
    pub fn take(&mut self, requested: Area) -> (Vec<Move>, Tiles) {
        if !self.moves.iter().all(|it| requested.covers(it.to)) {
            self.drop_moves();
        }
        let tiles = self.dirty.split_off(requested);
        // A final move is useless if the pixels of its target are sent anyway.
        while self.moves.pop_if(|last| tiles.covers(last.to)).is_some() {}
        self.set_in_flight(&tiles);
        (std::mem::take(&mut self.moves), tiles)
    }

    /// Sets the tiles that are planned and not encoded yet.
    pub fn set_in_flight(&mut self, tiles: &Tiles) {
        if tiles.size() == self.dirty.size() {
            self.in_flight.clone_from(tiles);
        } else {
            // The picture has a new size. Nothing of the old plan will be encoded.
            self.in_flight = Tiles::none(self.dirty.size().0, self.dirty.size().1);
        }
    }

    /// Replaces all pending moves with dirty tiles.
    fn drop_moves(&mut self) {
        self.moves.drain(..).for_each(|it| self.dirty.insert_area(it.to));
    }
}

impl Move {
    /// Applies the move to a property of tiles. A target tile gets the property if its source has
    /// it in `before`, or if the tile itself has it there and is only partly overwritten. Other
    /// tiles in `set` are unchanged.
    pub fn apply(&self, before: &Tiles, set: &mut Tiles) {
        for tile in before.touched(self.to) {
            let to = tile.intersection(self.to);
            let (x, y) = (to.x - self.to.x + self.from.0, to.y - self.to.y + self.from.1);
            let keeps = to != tile && before.touches(tile);
            set.put(tile, keeps || before.touches(Area { x, y, ..to }));
        }
    }
}

#[cfg(test)]
mod test;
